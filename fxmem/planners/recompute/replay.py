"""A schedule as the decisions that it amounts to: where a search may begin."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fxmem.planners.kernel.binding import State
from fxmem.planners.kernel.joint import KEEP, OFFLOAD
from fxmem.planners.problem import Problem
from fxmem.schedule.actions import Action, Compute, Free, Offload, Recompute, Reload, StartBackward


def started(problem: Problem, start: Sequence[Action] | frozenset[int]) -> State:
    """The state that `Options.start` names, as far as its ops and storages are this program's."""
    if not isinstance(start, frozenset):
        return state_of(problem, [action for action in start if _is_known(problem, action)])
    saved = np.zeros(problem.num_storages, dtype=np.uint8)
    saved[[s for s in start if 0 <= s < problem.num_storages]] = KEEP
    return State(saved)


def _is_known(problem: Problem, action: Action) -> bool:
    match action:
        case Compute(op) | Recompute(op):
            return op in problem.kernel_of_op
        case Offload(storage) | Free(storage) | Reload(storage):
            return storage < problem.num_storages
        case _:
            return True


def state_of(problem: Problem, actions: Sequence[Action]) -> State:
    """The decisions that `actions` amount to: what crosses the start of backward and how, what is forgotten where."""
    walk = _Replay(problem, actions)
    for step, action in enumerate(actions):
        walk.play(step, action)
    return State(walk.saved, tuple(sorted(walk.drops)))


class _Replay:
    """Where each forward storage is, action by action."""

    def __init__(self, problem: Problem, actions: Sequence[Action]) -> None:
        self.problem = problem
        self.saved = np.zeros(problem.num_storages, dtype=np.uint8)
        self.drops: set[tuple[int, int]] = set()
        self.last: dict[int, int] = {}  # storage -> segment of its last use in backward
        self.is_backward = False
        self.segment = self._segments(actions)

    def _segments(self, actions: Sequence[Action]) -> list[int]:
        """For each action the backward kernel that it is for: the next one that runs."""
        problem, found, ahead = self.problem, [], self.problem.num_kernels - 1
        for action in reversed(actions):
            if isinstance(action, Compute) and problem.kernel_of_op[action.op] >= problem.num_forward:
                ahead = problem.kernel_of_op[action.op]
            found.append(ahead)
        return found[::-1]

    def play(self, step: int, action: Action) -> None:
        match action:
            case StartBackward():
                self.is_backward = True
            case Compute(op) | Recompute(op):
                self._run(self.problem.kernel_of_op[op], self.segment[step])
            case Free(storage) if not self.is_backward:
                self.saved[storage] = OFFLOAD
            case Reload(storage) | Free(storage):
                self._gone(storage, self.segment[step])
            case Offload():
                pass

    def _run(self, kernel: int, segment: int) -> None:
        made, read = self.problem.writes(kernel), self.problem.reads(kernel)
        if not self.is_backward:
            self.saved[made] = KEEP
            return
        for storage in made:
            self._gone(int(storage), segment)
            if int(storage) not in self.last and self.saved[storage] == KEEP and kernel < self.problem.num_forward:
                self.saved[storage] = 0  # made again before backward read it: it was not there
        for storage in (*made, *read):
            self.last[int(storage)] = segment

    def _gone(self, storage: int, segment: int) -> None:
        """It comes back in `segment`: after its last use before that it was given up."""
        before = self.last.get(storage)
        if before is not None and before < segment and self.problem.producer[storage] < self.problem.num_forward:
            self.drops.add((before, storage))
