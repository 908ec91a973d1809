"""Recomputation where gradients are made in forward: what a part's forward made is made again before its gradients are.

Usually forward runs, then backward, which may run forward's kernels again. Where parts of a step have their gradients
made in forward, the two take turns. The same search serves: the kernels that may run again are those of the parts'
forwards, and none of them runs before something needs it; what runs once, in order, are the gradients, sums and the
real backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners.kernel.binding import Kernel, State, candidates
from fxmem.planners.problem import Problem, in_backward, reduce_program
from fxmem.planners.recompute.bound import free_lunch_s
from fxmem.planners.recompute.replay import started
from fxmem.planners.recompute.search import Pool, infeasible_beyond, perturb
from fxmem.planners.registry import Options, Solution
from fxmem.planners.stakes import stakes
from fxmem.schedule import Action, simulate

_LOOKS = (8, 2, 32)  # decisions examined beyond the best so far, in turn
_TURNS = 24
_SHARE = 0.5  # of the work that recomputing in backward alone has taken before


def interleaved(program: Program) -> Problem | None:
    """`program` as kernels of parts' forwards, which may run again, and the rest; None where nothing is made so, or
    draws and overwrites would change places."""
    inside = [op.index for op in program.ops if op.fused == "forward"]
    once = _running_once(program) if inside else set()
    if once.issuperset(inside):
        return None
    effects = [op.index for op in program.ops if op.is_random or op.is_collective or op.mutates]
    if max((i for i in effects if i not in once), default=-1) > min(once):
        return None
    return reduce_program(program, lambda op: op.index in once)


def _running_once(program: Program) -> set[int]:
    """Gradients, what can't run again inside of a part, what is returned, and all that depends on those."""
    kept, once = set(program.kept), set[int]()
    for op in program.ops:
        if op.is_input and not in_backward(op):
            continue
        in_part = op.fused is not None and (op.fused == "backward" or not op.recomputable)
        is_kept = not kept.isdisjoint(program.allocates(op))
        if in_backward(op) or in_part or is_kept or not once.isdisjoint(op.args):
            once.add(op.index)
    return once


def plan_interleaved(problem: Problem, budget_bytes: int, options: Options, plan: Callable[..., Solution]) -> Solution:
    """The better of `plan`'s, which recomputes only in backward, and what is found by recomputing anywhere.

    Raises BudgetInfeasible with the smallest peak found by either.
    """
    anywhere = interleaved(problem.program)
    if anywhere is None:
        return plan(problem, budget_bytes, options)
    try:
        found: Solution | BudgetInfeasible = plan(problem, budget_bytes, options)
    except BudgetInfeasible as error:
        found = error
    search = _Search(anywhere, budget_bytes, options)
    better = search.best(found.actions or ())
    if isinstance(found, Solution):
        return _cheaper(problem.program, found, better)
    if better is not None:
        return better
    raise min(found, search.refusal(), key=lambda error: error.min_bytes)


def _cheaper(program: Program, captured: Solution, anywhere: Solution | None) -> Solution:
    if anywhere is None:
        return captured
    seconds, other_s = (simulate(program, found.actions).seconds for found in (captured, anywhere))
    bound_s = min(captured.lower_bound_s, anywhere.lower_bound_s)
    chosen = anywhere if other_s < seconds else captured
    return replace(chosen, lower_bound_s=bound_s)


class _Search:
    """States of the interleaved problem, repaired, polished, perturbed."""

    def __init__(self, problem: Problem, budget_bytes: int, options: Options) -> None:
        self.problem, self.budget_bytes, self.options = problem, budget_bytes, options
        self.inside = _made_inside(problem)
        cand = candidates(problem) | self.inside  # of a part's forward everything, however small
        self.kernel = Kernel(problem, cand.astype(np.uint8), options.effort)
        self.kernel.load(self._lazy(self.kernel.all_saved()))
        self.pool = Pool(self.kernel, budget_bytes, self.kernel.evaluate(budget_bytes).peak_bytes)

    def best(self, start: Sequence[Action]) -> Solution | None:
        """The cheapest plan found; `start`: of a planner that recomputes in backward only."""
        limit, kernel, pool = stakes(self.problem, self.options), self.kernel, self.pool
        states = [kernel.all_saved(), *([started(self.problem, tuple(start))] if start else [])]
        for look in _LOOKS:
            pool.seen.clear()
            for state in map(self._lazy, states):
                pool.improve(state, limit.until(_SHARE / 2, self._gain_s), look)
        perturb(pool, limit.until(_SHARE, self._gain_s), range(_TURNS))
        return None if pool.best is None else self._solution(pool.best)

    @property
    def _gain_s(self) -> float:
        return min(self.pool.best_s, self.problem.baseline_s)

    def refusal(self) -> BudgetInfeasible:
        """The error that names the smallest peak found."""
        assert self.pool.nearest is not None
        peak_bytes, state = self.pool.nearest
        actions = self._solution(state).actions
        return infeasible_beyond(self.problem, self.budget_bytes, peak_bytes, actions)

    def _solution(self, state: State) -> Solution:
        self.kernel.load(state)
        order, _ = self.kernel.order()
        ops = self.problem.program.ops
        late = [in_backward(ops[self.problem.kernel_op[kernel]]) for kernel in order]
        actions = self.problem.actions(order, late.index(True) if True in late else len(order))
        return Solution(actions, -free_lunch_s(self.problem), {"work": self.options.effort.work})

    def _lazy(self, state: State) -> State:
        """`state`, with nothing of a part made before it is needed."""
        return replace(state, saved=np.where(self.inside, 0, state.saved).astype(np.uint8))


def _made_inside(problem: Problem) -> npt.NDArray[np.bool_]:
    """Storages that the forward of a part makes, and may make again."""
    ops = problem.program.ops
    kernels = [k for k in range(problem.num_forward) if ops[problem.kernel_op[k]].fused == "forward"]
    return np.isin(problem.producer, kernels)
