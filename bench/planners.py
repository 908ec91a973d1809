"""Planners on captured graphs: extra time, proven bound, effort at budgets in fractions of the all-saved peak.

    python -m bench.planners DIR [--instances a,b] --budgets 0.8,0.6 --planner auto [--json]

DIR holds programs in the JSON format of `Program.from_json`. The budget "min" asks for the smallest feasible one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.plan import make_plan

Row = dict[str, Any]


def run(program: Program, budget: float | str, planner: str, options: Options) -> Row:
    """One line of the table; extra and bound in percent of the all-saved op time."""
    unplanned = make_plan(program, None)
    peak = unplanned.baseline_peak_bytes
    limit = "min" if budget == "min" else int(float(budget) * peak)
    row: Row = {"instance": program.name, "budget_fraction": budget, "budget_bytes": limit, "planner": planner}
    clocks = (time.perf_counter, time.process_time, options.effort.now)
    started = [clock() for clock in clocks]

    def spent() -> Row:
        """Seconds of the clock and of the processor, and what the planner counts."""
        seconds = [clock() - start for clock, start in zip(clocks, started, strict=True)]
        return dict(zip(("solve_s", "cpu_s", "effort_s"), seconds, strict=True))

    try:
        plan = make_plan(program, limit, planner, options)
    except BudgetInfeasible as error:
        empty = {"peak_bytes": None, "extra_pct": None, "bound_pct": None}
        return row | empty | spent() | {"feasible": False, "min_bytes": error.min_bytes}
    if budget == "min":
        row |= {"budget_fraction": plan.peak_bytes / peak, "budget_bytes": plan.budget_bytes}
    percent = 100 / plan.baseline_s
    return row | {
        "peak_bytes": plan.peak_bytes,
        "extra_pct": plan.extra_s * percent,
        "bound_pct": plan.lower_bound_s * percent,
        **spent(),
        "feasible": True,
    }


def rows(
    folder: Path, names: Sequence[str], budgets: Sequence[float | str], planner: str, options: Options
) -> Iterator[Row]:
    """Every instance at every budget, in the order given (all of DIR when no names are given)."""
    for name in names or sorted(path.stem for path in folder.glob("*.json")):
        program = Program.load(folder / f"{name}.json")
        for budget in budgets:
            yield run(program, budget, planner, options)


def _line(row: Row) -> str:
    where = f"{row['instance']:<14} {row['budget_fraction']:<8.5} {row['planner']:<6}"
    spent = f"({row['effort_s']:.2f} s of effort, {row['cpu_s']:.2f} s of CPU)"
    if not row["feasible"]:
        return f"{where} infeasible; smallest found {row['min_bytes']} bytes {spent}"
    return f"{where} extra {row['extra_pct']:7.3f} %  bound {row['bound_pct']:7.3f} %  {spent}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.planners", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--instances", default="", help="names without .json, by comma (default: all)")
    parser.add_argument("--budgets", default="0.8,0.6", help="fractions of the all-saved peak, or min, by comma")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--solve-s", type=float, default=None, help="time limit a budget, in seconds")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    given = parser.parse_args(arguments)
    budgets = [b if b == "min" else float(b) for b in given.budgets.split(",")]
    names = [name for name in given.instances.split(",") if name]
    found = []
    for row in rows(given.folder, names, budgets, given.planner, Options(solve_s=given.solve_s)):
        found.append(row)
        if not given.json:
            print(_line(row), flush=True)
    if given.json:
        json.dump(found, sys.stdout, indent=1)
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
