"""Tiny problems solved outright: a shortest path over sets of live storages (Dijkstra 1959, doi:10.1007/BF01386390).

A place is (next kernel of the captured order, set of forward storages alive). From there the next kernel runs, or is
skipped if it is forward's and nothing needs it, or, in backward, a forward kernel runs (again). What a kernel touched
is then kept or forgotten; nothing is gained by forgetting it later. So the path is the fastest schedule of the captured
order that recomputes forward kernels in backward, and the path with the lowest highest step has the smallest peak.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import mutated
from fxmem.planners.problem import Problem

_MOST_STORAGES, _MOST_KERNELS = 20, 32
_PLACE_S = 1e-5  # of one place looked at
_MOST_PLACES = 10_000

Place = tuple[int, int]
"""Next kernel, bit set of live forward storages."""
Move = tuple[int, float, int, int]
"""Kernel that runs (-1: the next one is skipped), seconds, bytes above base while it runs, bits alive then."""


@dataclass(frozen=True)
class Outright:
    """`order`: kernels as they run, `num_forward` of them before backward."""

    order: tuple[int, ...]
    num_forward: int


class Tiny:
    """A problem small enough to search all its schedules; `is_solved` tells whether the last search came to its end."""

    def __init__(self, problem: Problem, effort: Effort, limit_s: float) -> None:
        self.problem, self.effort = problem, effort
        self.left = int(min(_MOST_PLACES, limit_s / _PLACE_S))
        self.is_solved = False

    def fastest(self, budget_bytes: int) -> Outright | None:
        """The least seconds under the budget; None if there is no schedule, or no end was found."""
        return self._search(budget_bytes, by_peak=False)

    def smallest(self) -> Outright | None:
        """A schedule of the least peak, whatever it takes; None if no end was found."""
        return self._search(None, by_peak=True)

    def _search(self, budget_bytes: int | None, by_peak: bool) -> Outright | None:
        """Dijkstra; a path is as long as its seconds, or as high as its highest step (of these the furthest first)."""
        room = None if budget_bytes is None else budget_bytes - self.problem.base_bytes
        start: Place = (0, 0)
        best: dict[Place, float] = {start: 0.0}
        came: dict[Place, tuple[Place, int]] = {}
        done: set[Place] = set()
        queue = [(0.0, 0, start)]
        self.is_solved = False
        while queue and self.left > 0:
            length, _, place = heapq.heappop(queue)
            if place in done:
                continue
            done.add(place)
            if place[0] == self.problem.num_kernels:
                self.is_solved = True
                self._count(len(done))
                return self._outright(came, place)
            for kernel, seconds, level, alive in self._moves(place):
                if room is not None and level > room:
                    continue
                longer = max(length, level) if by_peak else length + seconds
                for after in self._kept(kernel, place[0], alive):
                    if after not in done and longer < best.get(after, np.inf):
                        best[after] = longer
                        came[after] = place, kernel
                        heapq.heappush(queue, (longer, -after[0], after))
            self.left -= 1
        self.is_solved = not queue
        self._count(len(done))
        return None

    def _count(self, num_places: int) -> None:
        self.effort.spend(_PLACE_S * num_places)

    def _outright(self, came: dict[Place, tuple[Place, int]], place: Place) -> Outright:
        order, num_forward = [], 0
        while place in came:
            place, kernel = came[place]
            if kernel >= 0:
                order.append(kernel)
                num_forward += place[0] < self.problem.num_forward
        return Outright(tuple(reversed(order)), num_forward)

    def _moves(self, place: Place) -> Iterator[Move]:
        at, alive = place
        problem, facts = self.problem, self._facts
        if alive & facts.reads[at] == facts.reads[at]:
            yield at, facts.seconds[at], self._level(at, at, alive), alive | facts.writes[at]
        if at < problem.num_forward:
            if facts.skippable[at]:
                yield -1, 0.0, 0, alive
            return
        for kernel in facts.again:
            wanted = facts.writes[kernel] & facts.useful[at] & ~alive
            if wanted and alive & facts.reads[kernel] == facts.reads[kernel]:
                level = self._level(kernel, at, alive)
                yield kernel, facts.seconds[kernel], level, alive | facts.writes[kernel]

    def _level(self, kernel: int, at: int, alive: int) -> int:
        """Bytes while `kernel` runs and `at` is the next of the captured order."""
        facts = self._facts
        copies = facts.writes[kernel] & alive & facts.kept
        standing = facts.running if kernel == at else facts.waiting
        return self._bytes(alive | facts.writes[kernel]) + self._bytes(copies) + standing[at] + facts.workspace[kernel]

    def _kept(self, kernel: int, at: int, alive: int) -> Iterator[Place]:
        """The places after a move: every choice of what to keep of what it touched and what is still of use."""
        facts = self._facts
        after = at + 1 if kernel in (-1, at) else at
        alive &= facts.useful[after] | facts.kept
        touched = 0 if kernel < 0 else (facts.reads[kernel] | facts.writes[kernel]) & alive & ~facts.kept
        part = touched
        while True:
            yield after, alive & ~touched | part
            if not part:
                return
            part = (part - 1) & touched

    def _bytes(self, bits: int) -> int:
        known = self._facts.nbytes_of.get(bits)
        if known is None:
            low = bits & -bits
            known = self._facts.nbytes_of[bits] = self._bytes(bits ^ low) + self._facts.nbytes_of[low]
        return known

    @cached_property
    def _facts(self) -> _Facts:
        return _facts(self.problem)


@dataclass(frozen=True)
class _Facts:
    """Per kernel, sets of forward storages as bits: `useful[k]`, those that kernel k or a later one may need yet;
    `running[k]`, `waiting[k]`: bytes of backward's own storages while k runs, and just before."""

    reads: list[int]
    writes: list[int]
    seconds: list[float]
    workspace: list[int]
    skippable: list[bool]
    again: list[int]
    kept: int
    useful: list[int]
    running: list[int]
    waiting: list[int]
    nbytes_of: dict[int, int]


def is_tiny(problem: Problem) -> bool:
    """Whether all schedules can be looked at: few storages, few kernels, nothing written in place."""
    forward = int(np.count_nonzero((problem.producer >= 0) & (problem.producer < problem.num_forward)))
    return forward <= _MOST_STORAGES and problem.num_kernels <= _MOST_KERNELS and not bool(mutated(problem).any())


def _facts(problem: Problem) -> _Facts:
    nf, num_kernels = problem.num_forward, problem.num_kernels
    mine = np.flatnonzero((problem.producer >= 0) & (problem.producer < nf)).tolist()
    bit = {s: 1 << i for i, s in enumerate(mine)}

    def bits(storages: tuple[int, ...]) -> int:
        return sum(bit.get(s, 0) for s in storages)

    reads, writes = [bits(row) for row in problem.operands], [bits(row) for row in problem.results]
    kept = sum(bit[s] for s in mine if problem.keep_to_end[s])
    again = [k for k in range(nf) if problem.recomputable[k]]
    useful = list(itertools.accumulate(reversed(reads), lambda later, read: later | read, initial=0))[::-1]
    for at in range(num_kernels + 1):
        for kernel in reversed(again):
            if writes[kernel] & useful[at]:
                useful[at] |= reads[kernel]
    running, waiting = _backward_bytes(problem)
    return _Facts(
        reads, writes, problem.seconds.tolist(), problem.workspace_bytes.tolist(),
        [not problem.must_run[k] and not writes[k] & kept for k in range(nf)],
        again, kept, useful, running, waiting,
        {0: 0} | {bit[s]: int(problem.nbytes[s]) for s in mine},
    )  # fmt: skip


def _backward_bytes(problem: Problem) -> tuple[list[int], list[int]]:
    """Bytes of storages that backward makes while each kernel runs, and just before it."""
    running, waiting = (np.zeros(problem.num_kernels + 1, dtype=np.int64) for _ in range(2))
    last = problem.producer.copy()
    for kernel in range(problem.num_forward, problem.num_kernels):
        last[problem.reads(kernel)] = kernel
    last[problem.keep_to_end] = problem.num_kernels - 1
    for s in np.flatnonzero(problem.producer >= problem.num_forward):
        made, end = int(problem.producer[s]), int(last[s])
        running[made : end + 1] += problem.nbytes[s]
        waiting[made + 1 : end + 1] += problem.nbytes[s]
    return running.tolist(), waiting.tolist()
