"""Planners that move bytes off the device, on captured graphs: extra time, waiting, bytes moved, bound, solving time.

    python -m bench.offload DIR [--instances a,b] --budgets 0.7,0.5 --rho 0.25,1,4 --planners auto,offload-dp [--json]
    python -m bench.offload DIR --planners all --margins

DIR holds programs in the JSON format of `Program.from_json`. rho = (seconds to move everything that forward saves for
backward once) / (seconds of the step's ops) sets the bandwidth of the link: full duplex, no latency. The planner
`recompute` is `auto` without a tier. With `--margins` there is one row per instance, budget and link: `auto` and the
best of the other planners; exit status 1 if it was ever slower, or infeasible where another was not.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import show
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.plan import Plan, make_plan
from fxmem.planners.problem import Problem, reduce_program
from fxmem.schedule import Machine
from fxmem.schedule.simulate import Link

Row = dict[str, Any]
RECOMPUTE = "recompute"
ALL = ("auto", RECOMPUTE, "offload-all", "offload-greedy", "offload-dp", "revolve", "disk-revolve", "rotor", "pofo")


def saved_bytes(problem: Problem) -> int:
    """Bytes that forward makes and backward reads, what is returned left out."""
    nf = problem.num_forward
    read = np.zeros(problem.num_storages, dtype=np.bool_)
    read[problem.read_idx[problem.read_ptr[nf] :]] = True
    made = (problem.producer >= 0) & (problem.producer < nf)
    return int(problem.nbytes[read & made & ~problem.keep_to_end].sum())


def machine(problem: Problem, rho: float) -> Machine:
    """A host link that moves the saved bytes once in rho times the seconds of the step."""
    pace = max(saved_bytes(problem), 1) / (rho * problem.baseline_s)
    return Machine({"host": Link(pace, pace)})


def run(program: Program, fraction: float, rho: float, planner: str, options: Options) -> Row:
    """One line of the table; extra, stall and bound in percent of the all-saved op time."""
    row: Row = {"instance": program.name, "budget_fraction": fraction, "rho": rho, "planner": planner}
    options = replace(options, tiers=("host",), machine=machine(reduce_program(program), rho))
    if planner == RECOMPUTE:
        planner, options = "auto", replace(options, tiers=())
    started = time.perf_counter()
    try:
        plan = make_plan(program, fraction, planner, options)
    except BudgetInfeasible:
        names = ("peak_bytes", "extra_pct", "stall_pct", "bytes_moved", "bound_pct")
        return row | dict.fromkeys(names) | {"solve_s": time.perf_counter() - started, "feasible": False}
    return row | figures(plan) | {"solve_s": time.perf_counter() - started, "feasible": True}


def figures(plan: Plan) -> Row:
    """What a plan costs; extra = recompute + stall - what forward left out."""
    percent = 100 / plan.baseline_s
    return {
        "peak_bytes": plan.peak_bytes,
        "extra_pct": plan.extra_s * percent,
        "stall_pct": plan.simulation.stall_s * percent,
        "bytes_moved": plan.simulation.bytes_moved,
        "bound_pct": plan.lower_bound_s * percent,
    }


def rows(
    folder: Path,
    names: Sequence[str],
    budgets: Sequence[float],
    rhos: Sequence[float],
    planners: Sequence[str],
    options: Options,
) -> Iterator[Row]:
    """Every instance at every budget, link and planner, in the order given (all of DIR when no names are given)."""
    for name in names or sorted(path.stem for path in folder.glob("*.json")):
        program = Program.load(folder / f"{name}.json")
        for fraction in budgets:
            for rho in rhos:
                for planner in planners:
                    yield run(program, fraction, rho, planner, options)


def margins(found: Iterable[Row]) -> Iterator[Row]:
    """One row per cell: `margin_pct` is what the best other planner adds beyond `auto` (None: it found nothing)."""
    for _, group in itertools.groupby(found, lambda row: (row["instance"], row["budget_fraction"], row["rho"])):
        cell = list(group)
        (mine,) = [row for row in cell if row["planner"] == "auto"]
        others = [row for row in cell if row is not mine and row["feasible"]]
        best = min(others, key=lambda row: row["extra_pct"], default=None)
        yield {name: mine[name] for name in ("instance", "budget_fraction", "rho", "extra_pct", "bound_pct")} | {
            "best_other": best and best["planner"],
            "other_pct": best and best["extra_pct"],
            "margin_pct": best and (best["extra_pct"] - mine["extra_pct"] if mine["feasible"] else -math.inf),
            "solve_s": mine["solve_s"],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.offload", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--instances", default="", help="names without .json, by comma (default: all)")
    parser.add_argument("--budgets", default="0.7,0.5", help="fractions of the all-saved peak, by comma")
    parser.add_argument("--rho", default="0.25,1,4", help="links, by comma")
    parser.add_argument("--planners", default="auto,recompute,offload-dp", help="names, by comma; or all")
    parser.add_argument("--margins", action="store_true", help="auto against the best of the other planners")
    parser.add_argument("--solve-s", type=float, default=None, help="time limit of auto, in seconds")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of a table")
    given = parser.parse_args(arguments)
    names = [name for name in given.instances.split(",") if name]
    budgets, rhos = ([float(x) for x in text.split(",")] for text in (given.budgets, given.rho))
    planners = ALL if given.planners == "all" else given.planners.split(",")
    found = rows(given.folder, names, budgets, rhos, planners, Options(solve_s=given.solve_s))
    if not given.margins:
        show(found, given.json, "extra time with offload")
        return 0
    cells = list(margins(found))
    show(cells, given.json, "auto against the best of the other planners")
    worst = min((cell["margin_pct"] for cell in cells if cell["margin_pct"] is not None), default=0.0)
    print(f"worst margin: {worst:.6f} % of the step", file=sys.stderr)
    return int(worst < -1e-6)


if __name__ == "__main__":
    sys.exit(main())
