"""The frontier of a plan as a part of its page, and other plans of the step on it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence

from fxmem.planners.plan import Plan
from fxmem.report.chart import HEIGHT, dot, step_curve, svg
from fxmem.report.frontier import Point, frontier, planned
from fxmem.report.page import Page, legend, seconds, table
from fxmem.units import format_bytes

_NOTE = (
    "<p>The dot is this plan; other points are planned with little effort. Dashed: no plan of the graph in that form "
    "adds less.</p>"
)
At = Callable[[int, float], tuple[float, float]]
"""Bytes and extra seconds -> where they are drawn."""


def frontier_shown(page: Page, plan: Plan, beside: Sequence[Plan] = ()) -> str:
    """Extra time and its bound over the budget, as a picture and in numbers; `beside`, each at its peak."""
    points = frontier(plan)
    return _picture(page, plan, points, beside) + _NOTE + _points_table(plan, points) + _beside_table(plan, beside)


def _picture(page: Page, plan: Plan, points: Sequence[Point], beside: Sequence[Plan]) -> str:
    places = [*((p.budget_bytes, p.extra_s) for p in points), *((p.peak_bytes, p.extra_s) for p in beside)]
    low, high = (choose(nbytes for nbytes, _ in places) for choose in (min, max))
    most = max(1e-12, *(extra_s for _, extra_s in places))
    at = _scale(low, high, min(0.0, *(point.bound_s for point in points)), most)
    chosen = next(point for point in points if point.is_chosen)
    image = [
        step_curve([at(p.budget_bytes, p.bound_s) for p in points], "dim", is_dashed=True),
        step_curve([at(p.budget_bytes, p.extra_s) for p in points], "curve"),
        *(dot(*at(p.peak_bytes, p.extra_s), "beside-plan") for p in beside),
        dot(*at(chosen.budget_bytes, chosen.extra_s), "budget"),
    ]
    labels = (
        f'<span class="y" style="top:0">to {_percent(most, plan)} more time</span><span class="x" style="left:0">'
        f'{format_bytes(low)}</span><span class="x" style="right:0">{format_bytes(high)}</span>'
    )
    chart = page.chart(svg(1000, HEIGHT, image, "extra time over the budget"), labels, kind="low")
    return (legend([("fxmem", "curve"), (_family(beside), "beside-plan")]) if beside else "") + chart


def _scale(low: int, high: int, least_s: float, most_s: float) -> At:
    def at(nbytes: int, extra_s: float) -> tuple[float, float]:
        across = (nbytes - low) / max(high - low, 1)
        return 1000 * across, HEIGHT * (1 - (extra_s - least_s) / (1.3 * (most_s - least_s)))

    return at


def _family(plans: Sequence[Plan]) -> str:
    """What the planners are called: without the settings that follow their names."""
    return ", ".join(dict.fromkeys(plan.planner.rstrip("0123456789. ") for plan in plans))


def _points_table(plan: Plan, points: Sequence[Point]) -> str:
    is_form_told = any(point.is_split for point in points)
    rows = [
        [format_bytes(p.budget_bytes) + " (this plan)" * p.is_chosen, format_bytes(p.peak_bytes),
         _percent(p.extra_s, plan), _percent(p.bound_s, plan), *[("yes" if p.is_split else "no")] * is_form_told]
        for p in points
    ]  # fmt: skip
    bound = "#lower bound of its form" if is_form_told else "#lower bound"
    return table(["#budget", "#predicted peak", "#extra time", bound, *["#split"] * is_form_told], rows)


def _beside_table(plan: Plan, beside: Sequence[Plan]) -> str:
    if not beside:
        return ""
    rows = []
    for other in beside:
        figures = format_bytes(other.peak_bytes), _percent(other.extra_s, plan), _at_peak(plan, other)
        rows.append([html.escape(other.planner), *figures])
    return "<h3>Other plans of this step</h3>" + table(
        ["#planner", "#predicted peak", "#extra time", "#fxmem at that peak"], rows
    )


def _at_peak(plan: Plan, other: Plan) -> str:
    made = planned(plan, other.peak_bytes)
    return _percent(made.extra_s, plan) if made is not None else "does not fit"


def _percent(extra_s: float, plan: Plan) -> str:
    return f"{extra_s / plan.baseline_s:.2%}" if plan.baseline_s else seconds(extra_s)
