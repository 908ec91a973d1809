"""Lower bounds: on the peak no schedule can avoid, and on the extra seconds under a budget."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import Kernel, State
from fxmem.planners.problem import IntArray, Problem
from fxmem.planners.recompute.moments import MomentModel, last_readers, required_kernels

_LARGE = 2500
_CLOSED = 1e-4  # a gap of this share of the step counts as none


_LINKS = 3  # of a chain of recomputations that a bound on the peak follows


def least_bytes(problem: Problem) -> int:
    """The largest working set of a single kernel, with what stands there in any schedule of the captured order, and of
    getting its operands there: no budget below this is feasible."""
    if problem.num_kernels == 0:
        return problem.base_bytes
    nf, num_kernels = problem.num_forward, problem.num_kernels
    required = required_kernels(problem)
    first, last = problem.producer, last_readers(problem, [*np.flatnonzero(required).tolist(), *range(nf, num_kernels)])
    in_forward = (first >= 0) & (first < nf)
    again = problem.recomputable[np.maximum(first, 0)]
    last = np.where(in_forward & again, last_readers(problem, np.flatnonzero(required).tolist()), last)
    last = np.where(problem.keep_to_end, num_kernels - 1, np.maximum(last, first))
    runs = np.concatenate([required, np.ones(num_kernels - nf, dtype=np.bool_)])
    sure = (first >= 0) & runs[np.maximum(first, 0)]
    change = np.zeros(num_kernels + 1, dtype=np.int64)
    np.add.at(change, first[sure], problem.nbytes[sure])
    np.add.at(change, last[sure] + 1, -problem.nbytes[sure])
    standing = np.cumsum(change)[:num_kernels] + problem.workspace_bytes
    for k in range(nf, num_kernels):
        read = problem.reads(k)
        standing[k] += problem.nbytes[read[~sure[read] | (last[read] < k)]].sum()
    least = int(standing[runs].max(initial=0))
    return problem.base_bytes + max(least, _Arrivals(problem, standing, sure, first, last).least_bytes())


class _Arrivals:
    """What it takes to have the operands of a backward kernel there: each stands while the kernel before it runs, or is
    made between the two, beside what crosses the gap in any schedule; so are the operands of what makes it.

    `standing[k]`: bytes that no schedule avoids while k runs. `sure[s]`: storage s stands from `first[s]` to `last[s]`.
    """

    def __init__(
        self, problem: Problem, standing: IntArray, sure: npt.NDArray[np.bool_], first: IntArray, last: IntArray
    ) -> None:
        self.problem = problem
        self.standing: list[int] = standing.tolist()
        self.nbytes: list[int] = problem.nbytes.tolist()
        self.producer: list[int] = problem.producer.tolist()
        self.last: list[int] = np.where(sure, last, -1).tolist()
        change = np.zeros(problem.num_kernels + 2, dtype=np.int64)
        np.add.at(change, first[sure] + 1, problem.nbytes[sure])
        np.add.at(change, last[sure] + 1, -problem.nbytes[sure])
        self.crossing: list[int] = np.cumsum(change).tolist()

    def least_bytes(self) -> int:
        """The most that the operands of any backward kernel take."""
        kernels = range(self.problem.num_forward + 1, self.problem.num_kernels)
        needs = ((s, k) for k in kernels for s in self.problem.operands[k] if self._is_open(s, k))
        return max((self._arrive(s, k, _LINKS) for s, k in needs), default=0)

    def _is_open(self, storage: int, kernel: int) -> bool:
        """Whether it is decided if `storage` stands before `kernel`."""
        return 0 <= self.producer[storage] < self.problem.num_forward and self.last[storage] < kernel

    def _arrive(self, storage: int, kernel: int, links: int) -> int:
        problem, before = self.problem, kernel - 1
        is_there = storage in problem.operands[before] or storage in problem.results[before]
        stays = self.standing[before] + (0 if is_there or self.last[storage] >= before else self.nbytes[storage])
        maker = self.producer[storage]
        if not problem.recomputable[maker]:
            return stays
        takes = self.crossing[kernel] + int(problem.workspace_bytes[maker])
        takes += sum(self.nbytes[s] for s in problem.results[maker])
        operands = [s for s in problem.operands[maker] if self._is_open(s, kernel)]
        takes += sum(self.nbytes[s] for s in operands)
        for operand in operands:
            if takes >= stays or not links:
                break
            takes = max(takes, self._arrive(operand, kernel, links - 1))
        return min(stays, takes)


def free_lunch_s(problem: Problem) -> float:
    """Seconds of forward kernels that nothing needs: leaving them out makes the extra time negative."""
    needed = required_kernels(problem)
    open_kernels = [*np.flatnonzero(needed).tolist(), *range(problem.num_forward, problem.num_kernels)]
    while open_kernels:
        for s in problem.reads(open_kernels.pop()):
            made = int(problem.producer[s])
            if 0 <= made < problem.num_forward and not needed[made]:
                needed[made] = True
                open_kernels.append(made)
    return float(problem.seconds[: problem.num_forward][~needed].sum())


class LowerBound:
    """A growing set of moments: the linear relaxation first, then the MILP; proven for the captured backward order.

    `seconds`: the best bound so far. `states`: schedules that the MILP proposed on the way (exact at its moments only).
    """

    def __init__(
        self,
        problem: Problem,
        cand: npt.NDArray[np.uint8],
        budget_bytes: int,
        tie: bool = False,
        effort: Effort | None = None,
    ) -> None:
        self.kernel = Kernel(problem, cand, effort)
        self.model = MomentModel(problem, cand, budget_bytes)
        self.budget_bytes, self.tie = budget_bytes, tie
        self.seconds = self.floor_s = -free_lunch_s(problem)
        self.moments: list[int] = []
        self.states: list[State] = []
        self.exhausted = False

    def closes(self, extra_s: float) -> bool:
        """Whether `extra_s` is optimal for all practical purposes."""
        return extra_s - self.seconds <= _CLOSED * self.model.problem.baseline_s

    def step(self, deadline_s: float, best_s: float = np.inf) -> bool:
        """Solve with one more moment, the worst overflow of the last schedule, looking for plans under `best_s`. False
        when nothing more can be added."""
        if self.exhausted or not self._add_worst(self.states[-1] if self.states else self.kernel.all_saved()):
            self.exhausted = True
            return False
        found = len(self.states)
        if len(self.moments) == 1 or self.is_large:
            self._solve(deadline_s, best_s, integral=False)
        if not self.is_large:
            self._solve(deadline_s, best_s, integral=True)
        return len(self.states) > found

    def finish(self, deadline_s: float, best_s: float = np.inf) -> None:
        """The MILP at the moments found so far, for problems whose steps only solve relaxations."""
        if self.is_large and self.moments and not self.closes(best_s):
            self._solve(deadline_s, best_s, integral=True)

    def _solve(self, deadline_s: float, best_s: float, integral: bool) -> None:
        left_s = deadline_s - self.kernel.effort.now()
        if left_s <= 0 or self.closes(best_s):
            return
        answer = self.model.solve(self.moments, self.kernel.effort, left_s, integral, self.tie, best_s - self.floor_s)
        self.seconds = max(self.seconds, answer.bound_s + self.floor_s)
        if answer.state is not None:
            self.states.append(answer.state)

    @property
    def is_large(self) -> bool:
        """So many booleans that the MILP would take all the time there is."""
        return len(self.model.values) * (len(self.moments) + 1) > _LARGE

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
