"""Plans as one page that needs no network: memory before and after, lanes, saved tensors by module, frontier, floor."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from fxmem.planners.plan import Plan
from fxmem.report.chart import (
    COLOURS,
    LANES,
    Axes,
    binned,
    compute_lane,
    hover,
    lane,
    region_lane,
    stack,
)
from fxmem.report.decisions import standing_at_peak
from fxmem.report.floor import floor_of
from fxmem.report.frontier_page import frontier_shown
from fxmem.report.names import line_of, module_shown, short_source
from fxmem.report.page import BINS, Page, box, bullets, figures, legend, seconds, table, y_labels
from fxmem.report.regions import SplitRegion, bought, regions_of
from fxmem.report.saved import Group, Row, by_module
from fxmem.report.stacked import KINDS, Run, before_and_after
from fxmem.report.text import figure_rows, part_rows
from fxmem.units import format_bytes

NOTEBOOK_BINS = 400
_NUM_STANDING = 25
_NUM_ROWS = 2000
_OF_VALUES = ("module", "value", "#bytes", "=decision", "#seconds", "why", "line")
_OF_REGIONS = ("region", "where", "how", "its largest value")


def write_html(plan: Plan | Sequence[Plan], path: Path, beside: Sequence[Plan] = ()) -> None:
    """Write the report of a plan, or of all plans of a loop, to `path`; it needs no network to be read.

    `beside`: plans of the same step, drawn on the frontier.
    """
    plans = [plan] if isinstance(plan, Plan) else list(plan)
    page = Page(_title(plans), max(BINS // len(plans), 200))
    if len(plans) > 1:
        links = (f'<a href="#plan{i}">{i + 1}: {format_bytes(p.peak_bytes)}</a>' for i, p in enumerate(plans))
        page.add(f"<nav>{len(plans)} plans, one for each kind of step: {''.join(links)}</nav>")
    for number, one in enumerate(plans):
        page.add(f'<section class="plan" id="plan{number}">', *_sections(page, one, beside), "</section>")
    path.write_text(str(page), encoding="utf-8")


def notebook(plan: Plan) -> str:
    """The short report of a plan as a part of another page: nothing is planned for it."""
    page = Page(_title([plan]), NOTEBOOK_BINS)
    page.add(*_overview(page, plan))
    return f'<iframe srcdoc="{html.escape(str(page))}" style="width:100%;height:44rem;border:0"></iframe>'


def _title(plans: Sequence[Plan]) -> str:
    """The step and its budget, where all plans have the same."""
    budgets = {plan.budget_bytes for plan in plans}
    (budget,) = budgets if len(budgets) == 1 else (None,)
    return f"fxmem: {plans[0].program.name}" + (f" under {format_bytes(budget)}" if budget is not None else "")


def _sections(page: Page, plan: Plan, beside: Sequence[Plan]) -> Iterable[str]:
    yield from _overview(page, plan, f"<p>{html.escape(bought(plan).sentence)}</p>" if plan.program.fissions else "")
    yield f"<h2>What a smaller budget costs</h2>{frontier_shown(page, plan, beside)}"
    floor = floor_of(plan)
    yield f"<h2>What holds the floor, and what would lower it</h2><p>{html.escape(floor.sentence)}</p>"
    yield bullets(floor.ways)
    yield f"<h2>What stands at the peak</h2>{_standing(plan)}"


def _overview(page: Page, plan: Plan, bought_shown: str = "") -> Iterable[str]:
    """Figures, memory before and after, lanes, split regions and what they bought, saved tensors."""
    before, after = before_and_after(plan)
    top = max(plan.peak_bytes, plan.baseline_peak_bytes, plan.budget_bytes or 0)
    axes = Axes(page.bins, max(_length(before), _length(after)), int(top * 1.04))
    start = next((op.source for op in plan.program.ops if op.source), "")
    yield f"<p><code>{html.escape(short_source(start))}</code></p>"
    graph = [("graph", f"{plan.program.fingerprint}, {len(plan.program.ops)} ops"), ("planner", plan.planner)]
    yield figures([*figure_rows(plan), *graph])
    yield "<h2>Bytes on the device over the step</h2>"
    yield legend((kind, COLOURS[kind]) for kind in KINDS if before.bytes_of[kind].any() or after.bytes_of[kind].any())
    yield f"<h3>Before: everything saved, {format_bytes(plan.baseline_peak_bytes)}</h3>"
    yield _memory(page, before, axes, plan.budget_bytes)
    yield f"<h3>After: as planned, {format_bytes(plan.peak_bytes)}</h3>"
    yield _memory(page, after, axes, plan.budget_bytes)
    yield from _lanes(after, axes)
    yield from _regions(plan, bought_shown)
    yield f"<h2>Values that backward needs, by module</h2>{_saved(plan)}"


def _length(run: Run) -> float:
    return run.result.seconds or float(len(run.actions))


def _memory(page: Page, run: Run, axes: Axes, budget_bytes: int | None) -> str:
    at = binned(run, axes)
    peak = format_bytes(run.result.peak_bytes)
    labels = y_labels(axes, budget_bytes) + _x_labels(axes, bool(run.result.seconds))
    image = stack(run, at, axes, budget_bytes, f"bytes over the step, peak {peak}")
    return page.chart(image, labels, hover(run, at, page.words))


def _x_labels(axes: Axes, is_timed: bool) -> str:
    shown = seconds(axes.seconds) if is_timed else f"{axes.seconds:.0f} actions"
    return f'<span class="x" style="right:0">{shown}</span>'


def _lanes(run: Run, axes: Axes) -> Iterable[str]:
    yield legend((name, name) for name in LANES)
    yield box("compute", compute_lane(run, axes))
    for number, region in enumerate(regions_of(run.program)):
        yield box(f"{region.name}, {region.fission.num_parts} parts", region_lane(run, number, axes))
    streams = dict.fromkeys(span.stream for span in run.result.spans if span.stream != "compute")
    for stream in streams:
        spans = [(span.start_s, span.end_s) for span in run.result.spans if span.stream == stream]
        busy = sum(last - first for first, last in spans)
        yield box(f"{stream.replace('_', ' ')}, {seconds(busy)}", lane({"transfer": spans}, axes))


def _regions(plan: Plan, bought_shown: str) -> Iterable[str]:
    """What runs part by part, or why nothing does."""
    refusals = [text for name, text in part_rows(plan) if name == "not in parts"]
    if plan.program.fissions:
        rows = [list(map(html.escape, _region_cells(region))) for region in regions_of(plan.program)]
        yield f"<h2>What runs part by part</h2>{table(_OF_REGIONS, rows)}{bought_shown}"
    elif refusals:
        yield f"<h2>Why nothing runs part by part</h2>{bullets(refusals)}"


def _region_cells(region: SplitRegion) -> list[str]:
    fission = region.fission
    when = ", gradients made in forward" * fission.fuse
    how = f"{fission.num_parts} parts of up to {region.rows} along dimension {fission.dim}{when}"
    value = f"{format_bytes(region.part_bytes)} at once, {format_bytes(region.whole_bytes)} unsplit"
    where = ", ".join(filter(None, (region.module, region.line)))
    return [f"{region.name} ({region.num_ops} ops)", where, how, value * bool(region.part_bytes)]


def _saved(plan: Plan) -> str:
    groups, left = by_module(plan), _NUM_ROWS
    parts = []
    for group in groups:
        parts.append(_group(group, left))
        left = max(0, left - len(group.rows))
    return "".join(parts) or "<p>Nothing: backward needs only what is given.</p>"


def _group(group: Group, limit: int) -> str:
    sums = [(decision, group.bytes_of(decision)) for decision in ("keep", "recompute", "offload")]
    shown = ", ".join(f'<span class="{d}">{d}</span> {format_bytes(nbytes)}' for d, nbytes in sums if nbytes)
    count = f" &times; {group.count}" * (group.count > 1)
    extra = f", {seconds(group.seconds)} more" if group.seconds else ""
    rest = len(group.rows) - limit
    more = f"<p>and {rest} more</p>" if rest > 0 else ""
    return (
        f"<details><summary><code>{html.escape(module_shown(group.name))}</code>{count} "
        f'<span class="sum">{format_bytes(group.nbytes)}: {shown}{extra}</span></summary>'
        f"{table(_OF_VALUES, map(_cells, group.rows[:limit]))}"
        f"{more}</details>"
    )


def _cells(row: Row) -> list[str]:
    decision = f'<span class="{row.decision}">{row.decision}</span>'
    value = f"<code>{html.escape(row.value)}</code> {html.escape(row.target)}"
    cells = [html.escape(row.module), value, format_bytes(row.nbytes), decision, seconds(row.seconds)]
    return [*cells, html.escape(row.reason), html.escape(line_of(row.source))]


def _standing(plan: Plan) -> str:
    rows = standing_at_peak(plan)
    shown = [
        [format_bytes(row.nbytes), f"<code>{html.escape(row.name)}</code>", row.kind, html.escape(row.module),
         html.escape(short_source(row.source))]
        for row in rows[:_NUM_STANDING]
    ]  # fmt: skip
    rest = rows[_NUM_STANDING:]
    more = f"<p>and {len(rest)} more, {format_bytes(sum(row.nbytes for row in rest))} together</p>" if rest else ""
    return table(["#bytes", "what", "=kind", "module", "line"], shown) + more
