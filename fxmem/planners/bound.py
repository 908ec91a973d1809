"""Lower bounds: on the peak no schedule can avoid, and on the extra seconds under a budget."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from fxmem.planners.kernel import Kernel, State
from fxmem.planners.moments import MomentModel
from fxmem.planners.problem import Problem

_CLOSED = 1e-5  # a gap of this share of the step counts as none


def least_bytes(problem: Problem) -> int:
    """The largest working set of a single kernel, with what stands there in any schedule of the captured order: no budget
    below this is feasible."""
    model = MomentModel(problem, np.zeros(problem.num_storages, dtype=np.uint8), 0)
    kernels = [k for k in range(problem.num_kernels) if k >= problem.num_forward or model.required[k]]
    return problem.base_bytes + max((model.fixed_bytes(k)[0] for k in kernels), default=0)


class LowerBound:
    """A growing set of moments: the linear relaxation first, then the MILP, each proven for the captured backward order.

    `seconds`: the best bound so far. `states`: schedules that the MILP proposed on the way (exact at its moments only).
    """

    def __init__(self, problem: Problem, cand: npt.NDArray[np.uint8], budget_bytes: int, tie: bool = False) -> None:
        self.kernel = Kernel(problem, cand)
        self.model = MomentModel(problem, cand, budget_bytes)
        self.budget_bytes, self.tie = budget_bytes, tie
        self.seconds = 0.0
        self.moments: list[int] = []
        self.states: list[State] = []
        self.exhausted = False

    def closes(self, extra_s: float) -> bool:
        """Whether `extra_s` is optimal for all practical purposes."""
        return extra_s - self.seconds <= _CLOSED * self.model.problem.baseline_s

    def grow(self, deadline_s: float, max_moments: int = 8, best_s: float = np.inf) -> None:
        """Step until a schedule of the MILP fits, `best_s` is proven, or time is up."""
        while len(self.moments) <= max_moments and time.monotonic() < deadline_s and not self.closes(best_s):
            if not self.step(deadline_s):
                return

    def step(self, deadline_s: float) -> bool:
        """Solve with one more moment, the worst overflow of the last schedule. False when there is nothing more to add."""
        if self.exhausted or not self._add_worst(self.states[-1] if self.states else self.kernel.all_saved()):
            self.exhausted = True
            return False
        left_s = deadline_s - time.monotonic()
        if len(self.moments) == 1:
            self.seconds = max(self.seconds, self.model.solve(self.moments, left_s, integral=False).bound_s)
        answer = self.model.solve(self.moments, deadline_s - time.monotonic(), tie=self.tie)
        self.seconds = max(self.seconds, answer.bound_s)
        if answer.state is None:
            return False
        self.states.append(answer.state)
        return answer.proven

    def _add_worst(self, state: State) -> bool:
        self.kernel.load(state)
        score = self.kernel.evaluate(self.budget_bytes)
        if score.peak_bytes <= self.budget_bytes:
            return False
        moment = -1 - score.worst if score.worst < 0 else int(self.kernel.steps().segments[score.worst])
        if moment in self.moments:
            return False
        self.moments.append(moment)
        return True
