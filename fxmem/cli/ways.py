"""Ways to need fewer bytes than a step does: what each reaches, and what it costs."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

from fxmem.analysis.doctor import machine
from fxmem.budget import Budget
from fxmem.errors import FxmemError
from fxmem.options import settings
from fxmem.passes.offload import why_not_offloadable
from fxmem.planners import Options
from fxmem.planners.plan import Plan, make_plan
from fxmem.report.frontier import SOLVE_S, frontier, smallest
from fxmem.report.regions import regions_of
from fxmem.schedule import Recompute
from fxmem.step.forms import Forms
from fxmem.units import format_bytes, unit_of

_EFFORT_S = 0.5


@dataclass(frozen=True)
class Way:
    """A way lower: predicted peak, and the extra time as a share of the step."""

    what: str
    peak_bytes: int
    extra_share: float


class Planner:
    """Plans the graph of `plan` under other budgets, split or not as `fxmem.compile` would, with little effort."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        made = settings(solve_s=_EFFORT_S)
        self._forms = None if plan.joint is None else Forms(plan.joint, made, may_run=True)

    def under(self, budget: Budget) -> Plan:
        """Raises BudgetInfeasible."""
        if self._forms is None:
            return make_plan(self.plan.program, budget, "auto", Options(SOLVE_S))
        return self._forms.plan(self.plan.program, budget)

    def least(self) -> Plan:
        """The plan of the smallest budget that was found."""
        return min(self.under("min"), smallest(self.plan), key=lambda made: made.peak_bytes)


def ways(planner: Planner, least: Plan) -> list[Way]:
    """The best budget for what it costs, the smallest one, and offloading to what recomputing alone reaches: the
    cheapest first. Each is what `fxmem.compile` would do under that budget."""
    plan = planner.plan
    halfway = (plan.peak_bytes + least.peak_bytes) // 2
    found = [_way(plan, made) for made in (_best(planner, halfway), least) if made.peak_bytes < plan.peak_bytes]
    return sorted([*dict.fromkeys(found), *_offloading(plan)], key=lambda way: way.extra_share)


def _best(planner: Planner, halfway: int) -> Plan:
    """The plan that costs least for what it saves, among those around `halfway`."""
    plan, made = planner.plan, planner.under(halfway)
    points = [p for p in frontier(made, 4) if p.peak_bytes < plan.peak_bytes]
    best = min(points, key=lambda p: p.extra_s / (plan.peak_bytes - p.peak_bytes), default=None)
    return made if best is None or best.is_chosen else planner.under(best.budget_bytes)


def _way(plan: Plan, made: Plan) -> Way:
    split = [f"{region.name} in {region.fission.num_parts} parts" for region in regions_of(made.program)]
    again = ["recompute"] * any(isinstance(action, Recompute) for action in made.actions)
    budget = f'budget="{round_up(made.budget_bytes or made.peak_bytes)}"'
    return Way(", ".join([*again, *split, budget]), made.peak_bytes, _share(made.extra_s, plan))


def _offloading(plan: Plan) -> list[Way]:
    """Offloading under the smallest budget that recomputing alone can keep."""
    if plan.joint is None:
        return []
    limit_bytes = smallest(plan).peak_bytes
    options = Options(SOLVE_S, ("disk",), pinned=frozenset(why_not_offloadable(plan.joint, plan.program)))
    with contextlib.suppress(FxmemError):
        made = make_plan(plan.program, limit_bytes, "auto", replace(options, machine=machine(("disk",))))
        if made.simulation.bytes_moved:
            moved, limit = format_bytes(made.simulation.bytes_moved), round_up(limit_bytes)
            what = f'offload, budget="{limit}", tiers="disk": {moved} moved'
            return [Way(what, made.peak_bytes, _share(made.extra_s, plan))]
    return []


def round_up(nbytes: int) -> str:
    """Three digits at least, in a unit that budgets know."""
    unit, size = unit_of(nbytes)
    value = nbytes / size
    return f"{math.ceil(value)}{unit}" if value >= 100 or unit == "B" else f"{math.ceil(value * 100) / 100:g}{unit}"


def _share(extra_s: float, plan: Plan) -> float:
    return extra_s / plan.baseline_s if plan.baseline_s else 0.0
