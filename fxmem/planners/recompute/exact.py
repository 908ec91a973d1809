"""The moment MILP driven to the optimum: moments are added until its schedule fits everywhere (small graphs)."""

from __future__ import annotations

from fxmem.planners.kernel.binding import Kernel
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.bound import LowerBound, least_bytes
from fxmem.planners.recompute.mincut import CutFamily
from fxmem.planners.recompute.search import Pool, infeasible, smallest, solution
from fxmem.planners.registry import Options, Solution, register

_SOLVE_S = 60.0


@register("exact")
def exact(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Schedules of the MILP, repaired and polished, the best kept; `notes["optimal"]`: its bound was reached.

    Raises BudgetInfeasible with the smallest peak found.
    """
    limit_s = _SOLVE_S if options.solve_s is None else options.solve_s
    effort = options.effort
    deadline_s = effort.now() + limit_s
    kernel = Kernel(problem, effort=effort)
    kernel.load(kernel.all_saved())
    score = kernel.evaluate(budget_bytes)
    pool = Pool(kernel, budget_bytes, score.peak_bytes)
    pool.improve(kernel.all_saved())
    bound = LowerBound(problem, kernel.cand, budget_bytes, tie=True, effort=effort)
    if budget_bytes >= least_bytes(problem):
        while not bound.exhausted and not bound.closes(pool.best_s) and effort.now() < deadline_s:
            found = len(bound.states)
            if not bound.step(deadline_s, pool.best_s):
                break
            for state in bound.states[found:]:
                pool.improve(state)
        bound.finish(deadline_s, pool.best_s)
        for state in bound.states:
            pool.improve(state)
    if pool.best is None:
        family = CutFamily(kernel)
        least, state = smallest(kernel, family, score.peak_bytes, effort.now() + limit_s, options.seed)
        if least > budget_bytes:
            raise infeasible(kernel, budget_bytes, least, state)
        pool.improve(state)
    assert pool.best is not None
    notes = {"moments": len(bound.moments), "optimal": bound.closes(pool.best_s)}
    return solution(kernel, pool.best, bound.seconds, notes)
