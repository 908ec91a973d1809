"""How extra time grows as the budget falls: the same graph planned under a few budgets, with little effort each.

A plan of a split graph is compared with the graph unsplit as well: each point is the cheaper of the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxmem.budget import Budget
from fxmem.errors import BudgetInfeasible, FxmemError
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.plan import STAYS, Plan, make_plan

SOLVE_S = 0.05
NUM_POINTS = 6


@dataclass(frozen=True)
class Point:
    """One budget: predicted peak, extra time and the proven lower bound on it, for graphs split as the point's is.

    `is_chosen`: the plan reported. `is_split`: regions run in parts.
    """

    budget_bytes: int
    peak_bytes: int
    extra_s: float
    bound_s: float
    is_chosen: bool = False
    is_split: bool = False


def frontier(plan: Plan, num_points: int = NUM_POINTS) -> list[Point]:
    """Points from the smallest budget to no limit, by budget; among them the plan itself, as it is.

    A point that needs more time than one of a smaller budget takes that one's schedule, which fits as well.
    """
    least = smallest(plan)
    limits = list(_limits(least.peak_bytes, plan.baseline_peak_bytes, num_points))
    found = [_point(made) for limit in limits if (made := planned(plan, limit)) is not None]
    free = Point(plan.baseline_peak_bytes, plan.baseline_peak_bytes, 0.0, 0.0)
    chosen = replace(_point(plan), is_chosen=True)
    return _falling(sorted([_point(least), *found, free, chosen], key=lambda p: (p.budget_bytes, not p.is_chosen)))


def smallest(plan: Plan) -> Plan:
    """The plan of the smallest budget found with little effort; the plan itself if that needs less."""
    made = planned(plan, "min")
    return made if made is not None and made.peak_bytes <= plan.peak_bytes else plan


def planned(plan: Plan, budget: Budget) -> Plan | None:
    """The same graph on the same machine under another budget, split as it is or not; None if that is too small."""
    programs = [plan.program]
    if plan.program.unsplit is not None and not plan.machine.links:  # what can be offloaded is known of one form only
        programs.append(plan.program.reference)
    found = [made for program in programs if (made := planned_as(plan, program, budget)) is not None]
    return min(found, key=lambda made: (made.peak_bytes if budget == "min" else 0, made.extra_s), default=None)


def planned_as(plan: Plan, program: Program, budget: Budget) -> Plan | None:
    """`program`, a form of the plan's graph, on the same machine under a budget; None if that is too small."""
    tiers = tuple(plan.machine.links)
    options = Options(SOLVE_S, tiers, plan.machine, pinned=frozenset(map(int, plan.notes.get(STAYS, {}))))
    try:
        return make_plan(program, budget, "auto", options)
    except BudgetInfeasible:
        return None
    except FxmemError:  # planners that know their bounds may refuse a graph that another planner took
        return None


def _limits(low: int, high: int, count: int) -> Iterator[int]:
    """More of them near the smallest, where time grows fastest."""
    for number in range(1, count + 1):
        yield low + int((high - low) * (number / (count + 1)) ** 1.5)


def _point(plan: Plan) -> Point:
    limit = plan.budget_bytes or plan.peak_bytes
    return Point(limit, plan.peak_bytes, plan.extra_s, plan.lower_bound_s, is_split=plan.program.unsplit is not None)


def _falling(points: list[Point]) -> list[Point]:
    made: list[Point] = []
    for point in points:
        best = min(made, key=lambda p: p.extra_s, default=point)
        if best.extra_s < point.extra_s and not point.is_chosen:
            bound_s = min(best.bound_s, point.bound_s)
            point = replace(best, budget_bytes=point.budget_bytes, bound_s=bound_s, is_chosen=False)
        made.append(point)
    return made
