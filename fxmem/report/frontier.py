"""How extra time grows as the budget falls: the same graph planned under a few budgets, with little effort each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxmem.errors import BudgetInfeasible, FxmemError
from fxmem.planners import Options
from fxmem.planners.plan import STAYS, Plan, make_plan

SOLVE_S = 0.05
NUM_POINTS = 6


@dataclass(frozen=True)
class Point:
    """One budget: predicted peak, extra time and the proven lower bound on it. `is_chosen`: the plan reported."""

    budget_bytes: int
    peak_bytes: int
    extra_s: float
    bound_s: float
    is_chosen: bool = False


def frontier(plan: Plan, num_points: int = NUM_POINTS) -> list[Point]:
    """Points from the smallest budget to no limit, by budget; among them the plan itself, as it is.

    A point that needs more time than one of a smaller budget takes that one's schedule, which fits as well.
    """
    least = smallest(plan)
    limits = list(_limits(least.peak_bytes, plan.baseline_peak_bytes, num_points))
    found = [_point(made) for limit in limits if (made := planned(plan, limit)) is not None]
    free = Point(plan.baseline_peak_bytes, plan.baseline_peak_bytes, 0.0, 0.0)
    chosen = Point(plan.budget_bytes or plan.peak_bytes, plan.peak_bytes, plan.extra_s, plan.lower_bound_s, True)
    return _falling(sorted([_point(least), *found, free, chosen], key=lambda p: (p.budget_bytes, not p.is_chosen)))


def smallest(plan: Plan) -> Plan:
    """The plan of the smallest budget found with little effort; the plan itself if that needs less."""
    made = planned(plan, "min")
    return made if made is not None and made.peak_bytes <= plan.peak_bytes else plan


def planned(plan: Plan, budget: object, without_tiers: bool = False) -> Plan | None:
    """The same graph on the same machine under another budget; None if that is too small."""
    tiers = () if without_tiers else tuple(plan.machine.links)
    options = Options(SOLVE_S, tiers, plan.machine, pinned=frozenset(map(int, plan.notes.get(STAYS, {}))))
    try:
        return make_plan(plan.program, budget, "auto", options)  # type: ignore[arg-type]
    except BudgetInfeasible:
        return None
    except FxmemError:  # planners that know their bounds may refuse a graph that another planner took
        return None


def _limits(low: int, high: int, count: int) -> Iterator[int]:
    """More of them near the smallest, where time grows fastest."""
    for number in range(1, count + 1):
        yield low + int((high - low) * (number / (count + 1)) ** 1.5)


def _point(plan: Plan) -> Point:
    return Point(plan.budget_bytes or plan.peak_bytes, plan.peak_bytes, plan.extra_s, plan.lower_bound_s)


def _falling(points: list[Point]) -> list[Point]:
    made: list[Point] = []
    for point in points:
        best = min(made, key=lambda p: p.extra_s, default=point)
        if best.extra_s < point.extra_s and not point.is_chosen:
            point = replace(point, peak_bytes=best.peak_bytes, extra_s=best.extra_s)
        made.append(point)
    return made
