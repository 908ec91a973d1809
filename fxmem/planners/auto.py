"""The default planner: recomputation alone, or offloading too where there is a tier to use."""

from __future__ import annotations

from fxmem.planners.chains.graph_starts import plan_alone
from fxmem.planners.offload.search import plan_with_offload
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.interleaved import plan_interleaved
from fxmem.planners.registry import Options, Solution, register


@register("auto")
def auto(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Least extra time found under the budget in `solve_s`, offloading to `tiers` if the machine has them.

    Raises BudgetInfeasible with the smallest peak found.
    """
    chosen = plan_with_offload if options.tiers and options.machine.links else plan_alone
    return plan_interleaved(problem, budget_bytes, options, chosen)
