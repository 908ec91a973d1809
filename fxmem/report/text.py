"""A plan as text: figures, what stands at the peak, the saved-tensor table."""

from __future__ import annotations

import io
import shutil
from collections import Counter

from rich.console import Console
from rich.table import Table

from fxmem.planners.plan import NOT_SPLIT, Plan
from fxmem.report.decisions import saved_tensors, standing_at_peak
from fxmem.report.names import line_of, short_text, shortened
from fxmem.report.regions import regions_of
from fxmem.schedule import Offload, Recompute
from fxmem.units import format_bytes

NUM_ROWS = 12
_WIDE, _NARROW = 110, 60
_NUM_REFUSALS = 3
_PEAK_FIXED = 33  # columns that are not names and lines


def summary(plan: Plan, width: int | None = None) -> str:
    """The whole report, `width` columns wide: by default as wide as the terminal, at most 110."""
    width = width or max(_NARROW, min(_WIDE, shutil.get_terminal_size((_WIDE, 24)).columns))
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    for table in (figures(plan), _peak_table(plan, width), _saved_table(plan), _stays_table(plan)):
        if table.row_count:
            console.print(table)
    text = str(console.file.getvalue())  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.rstrip().splitlines()) + "\n"


def figures(plan: Plan) -> Table:
    """Baseline, budget, peak, extra time, bound, gap."""
    table = Table(title=f"plan of {plan.program.name} by {plan.planner}", show_header=False, title_justify="left")
    for name, value in [*figure_rows(plan), *part_rows(plan)]:
        table.add_row(name, value)
    return table


def figure_rows(plan: Plan) -> list[tuple[str, ...]]:
    """(name, value) of every figure of the plan."""
    base_s, base_bytes = plan.baseline_s or 1.0, plan.baseline_peak_bytes or 1
    moved = plan.simulation.bytes_moved
    bound = "lower bound on it" if plan.program.unsplit is None else "lower bound of this split"
    rows: list[tuple[str, ...]] = [
        ("peak with no plan", format_bytes(plan.baseline_peak_bytes)),
        ("budget", "none" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)),
        ("predicted peak", f"{format_bytes(plan.peak_bytes)} ({plan.peak_bytes / base_bytes:.1%})"),
        ("op time of a step", f"{plan.baseline_s * 1e3:.2f} ms"),
        ("extra time", f"{plan.extra_s * 1e3:.2f} ms ({plan.extra_s / base_s:.2%})"),
        (bound, f"{plan.lower_bound_s * 1e3:.2f} ms (gap {plan.gap:.2%} of the step)"),
        ("recomputed ops", str(sum(isinstance(action, Recompute) for action in plan.actions))),
    ]
    if moved:
        num = sum(isinstance(action, Offload) for action in plan.actions)
        rows.append(("offloaded", f"{num} storages, {format_bytes(moved)} moved both ways"))
    return [*rows, ("solving took", f"{plan.solve_s:.2f} s")]


def part_rows(plan: Plan) -> list[tuple[str, str]]:
    """What runs part by part, and why other things don't; nothing where that was not looked at."""
    rows = [("runs in parts", region.sentence) for region in regions_of(plan.program)]
    return rows + [("not in parts", short_text(line)) for line in plan.notes.get(NOT_SPLIT, [])[:_NUM_REFUSALS]]


def line(plan: Plan, measured_bytes: int | None) -> str:
    """A step in one line, for a log: budget, predicted, measured, extra time, what is run again and what moves."""
    budget = "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    measured = "not measured" if measured_bytes is None else f"measured {format_bytes(measured_bytes)}"
    base = f"{format_bytes(plan.baseline_peak_bytes)} without a plan"
    parts = [f"{budget}, predicted {format_bytes(plan.peak_bytes)}, {measured} ({base})"]
    again = sum(isinstance(action, Recompute) for action in plan.actions)
    parts.append(f"{plan.extra_share:.2%} more op time" + f" for {again} ops run again" * bool(again))
    if plan.program.fissions:
        split = (f"{region.name} in {region.fission.num_parts} parts" for region in regions_of(plan.program))
        parts.append(", ".join(split))
    if plan.simulation.bytes_moved:
        tiers = " and ".join(dict.fromkeys(a.tier for a in plan.actions if isinstance(a, Offload)))
        parts.append(f"{format_bytes(plan.simulation.bytes_moved)} moved to the {tiers} and back")
    return "; ".join(parts)


def _peak_table(plan: Plan, width: int) -> Table:
    table = Table(title="what stands at the peak", title_justify="left")
    names = (width - _PEAK_FIXED) // 2
    lines = width - _PEAK_FIXED - names
    table.add_column("bytes", justify="right", no_wrap=True, width=11)
    table.add_column("what", no_wrap=True, width=names)
    table.add_column("kind", no_wrap=True, width=9)
    table.add_column("line", no_wrap=True, width=lines)
    rows = standing_at_peak(plan)
    for row in rows[:NUM_ROWS]:
        table.add_row(format_bytes(row.nbytes), row.name, row.kind, shortened(line_of(row.source), lines))
    if len(rows) > NUM_ROWS:
        rest = rows[NUM_ROWS:]
        table.add_row(format_bytes(sum(row.nbytes for row in rest)), f"{len(rest)} more", "", "")
    return table


def _saved_table(plan: Plan) -> Table:
    rows = saved_tensors(plan)
    table = Table(title="values backward needs", title_justify="left")
    for name in ("bytes", "number", "op", "decision"):
        table.add_column(name, justify="left" if name in ("op", "decision") else "right")
    nbytes: Counter[tuple[str, str]] = Counter()
    number: Counter[tuple[str, str]] = Counter()
    for row in rows:
        nbytes[row.target, row.decision] += row.nbytes
        number[row.target, row.decision] += 1
    for (target, decision), total in nbytes.most_common(NUM_ROWS):
        table.add_row(format_bytes(total), str(number[target, decision]), target, decision)
    return table


def _stays_table(plan: Plan) -> Table:
    """Values that could not be offloaded, by reason; no rows if none was meant to be."""
    table = Table(title="values backward needs that could not be offloaded", title_justify="left")
    for name in ("bytes", "number", "why"):
        table.add_column(name, justify="left" if name == "why" else "right")
    nbytes: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for row in saved_tensors(plan):
        if row.stays:
            nbytes[row.stays] += row.nbytes
            number[row.stays] += 1
    for why, total in nbytes.most_common():
        table.add_row(format_bytes(total), str(number[why]), why)
    return table
