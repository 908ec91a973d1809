"""What the chain planners find, as starting states of the joint search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fxmem.errors import BudgetInfeasible
from fxmem.planners.kernel.binding import State
from fxmem.planners.kernel.joint import KEEP, OFFLOAD
from fxmem.planners.problem import Problem
from fxmem.planners.registry import Options, Solution, get_planner
from fxmem.schedule.actions import Action, Compute, Free, Offload, Recompute, Reload, StartBackward

NAMES = ("offload-all", "offload-greedy", "disk-revolve", "revolve", "pofo")
"""`rotor` and `offload-dp` are left out: pofo's search begins with theirs."""


def chain_solutions(problem: Problem, budget_bytes: int, options: Options) -> Iterator[Solution]:
    """The answers of the chain planners that find one, each what the planner of that name gives under these options."""
    for name in NAMES:
        try:
            found = get_planner(name)(problem, budget_bytes, options)
        except BudgetInfeasible:
            continue
        yield replace(found, notes={**found.notes, "found by": name})


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
