"""A lower bound on the extra seconds when storages may also be offloaded: the moment MILP with a third source.

Added to the model of `moments` (segment k ends with moment k):

    reload[k, v] in [0, 1]   v, absent when segment k starts, is reloaded in it: a source like keep and run
    copied[k, v]             share of v that was copied out before moment k - 1 (k = 0: before backward)
    stall[k] >= 0            seconds that compute waits in segment k

    reload[k, v] <= copied[k, v],  copied[k - 1, v] <= copied[k, v]
    copies out, of what is made at or after a kernel, fit between that kernel and the moment
    copies in, for what segments j.. read before a kernel, fit between moment j - 1 and that kernel

A value that is reloaded in a segment was neither there when it started nor recomputed in it, so it is back before
backward first reads it there. Proven for schedules in the captured backward order that offload what forward made.
"""

from __future__ import annotations

import numpy as np

from fxmem.planners.kernel.binding import State
from fxmem.planners.kernel.joint import OFFLOAD, JointKernel
from fxmem.planners.recompute.moments import Build, MomentModel
from fxmem.schedule.simulate import Link

_NUM_POINTS = 24  # release and deadline rows per window
_MAX_MOMENTS = 6
_LONGEST_COPY = 4.0  # steps

Terms = list[tuple[int, float]]


class OffloadModel(MomentModel):
    """The moment MILP of one problem, link and budget."""

    def __init__(self, kernel: JointKernel, link: Link, budget_bytes: int) -> None:
        super().__init__(kernel.problem, kernel.cand, budget_bytes)
        self.link = link
        self.movable = [v for v in self.values if kernel.can[v]]
        self.place = {v: i for i, v in enumerate(self.movable)}
        self.out_s = {v: self._copy_s(v, True) for v in self.movable}
        self.in_s = {v: self._copy_s(v, False) for v in self.movable}

    def _copy_s(self, v: int, out: bool) -> float:
        """Seconds of one copy, at most a few steps' worth: shorter is still a bound, and keeps coefficients alike."""
        seconds = self.link.seconds(int(self.problem.nbytes[v]), out)
        return min(seconds, _LONGEST_COPY * max(self.problem.baseline_s, 1e-30))

    def build(self, backward: list[int], forward: list[int]) -> Build:
        """The MILP with these moments; forward ones say nothing, for a value may be away there."""
        build = _OffloadBuild(self, backward, [])
        build.add_link_rows()
        return build


class _OffloadBuild(Build):
    """Columns and rows of the link."""

    model: OffloadModel

    def add_columns(self) -> None:
        """reload, copied, stall; seconds in units of the step's."""
        self.num_movable, self.start = len(self.model.movable), len(self.cost)
        self.unit = max(self.model.problem.baseline_s, 1e-30)
        shares = 2 * self.num_segments * self.num_movable
        self.cost = np.concatenate([self.cost, np.zeros(shares), np.full(self.num_segments, self.unit)])
        self.upper = np.concatenate([self.upper, np.ones(shares), np.full(self.num_segments, np.inf)])

    def reload(self, segment: int, v: int) -> int:
        return self.start + segment * self.num_movable + self.model.place[v]

    def copied(self, segment: int, v: int) -> int:
        return self.reload(self.num_segments + segment, v)

    def stall(self, segment: int) -> int:
        return self.start + 2 * self.num_segments * self.num_movable + segment

    def _source(self, segment: int, v: int) -> Terms:
        terms = super()._source(segment, v)
        return [*terms, (self.reload(segment, v), 1.0)] if v in self.model.place else terms

    def add_link_rows(self) -> None:
        """What the two directions of the link can carry."""
        p = self.model.problem
        self.clock = np.concatenate([[0.0], np.cumsum(p.seconds)])  # all kernels once, in order
        self.starts = [p.num_forward, *(m + 1 for m in self.moments)]
        self.ends = [*self.starts[1:], p.num_kernels]
        for segment in range(self.num_segments):
            self._copied_rows(segment)
            self._out_rows(segment)
            self._in_rows(segment)

    def _copied_rows(self, segment: int) -> None:
        for v in self.model.movable:
            self.rows.add([(self.copied(segment, v), 1.0), (self.reload(segment, v), -1.0)], 0.0)
            if segment:
                self.rows.add([(self.copied(segment, v), 1.0), (self.copied(segment - 1, v), -1.0)], 0.0)
            else:
                first = self.first(int(self.model.problem.producer[v]))
                self.rows.add([(first, 1.0), (self.reload(0, v), -1.0)], 0.0)

    def _work(self, segments: range) -> Terms:
        """Recomputation and waiting in `segments`, in units of the step's seconds."""
        p = self.model.problem
        runs = [
            (self.run(k, o), float(p.seconds[o]) / self.unit)
            for k in segments
            for o in self.model.kernels
            if p.recomputable[o]
        ]
        return [*runs, *((self.stall(k), 1.0) for k in segments)]

    def _out_rows(self, segment: int) -> None:
        """Copies out end before moment segment - 1, or before backward starts."""
        model = self.model
        made = model.problem.producer
        end = self.clock[self.moments[segment - 1] if segment else model.problem.num_forward]
        work = self._work(range(max(segment, 1)))
        for release in _spread(sorted({int(made[v]) for v in model.movable})):
            copies = [
                (self.copied(segment, v), -model.out_s[v] / self.unit) for v in model.movable if made[v] >= release
            ]
            self.rows.add([*work, *copies], -float(end - self.clock[release + 1]) / self.unit)

    def _first_reads(self, segment: int) -> dict[int, int]:
        p, found = self.model.problem, dict[int, int]()
        for k in range(self.starts[segment], self.ends[segment]):
            for v in p.reads(k):
                if int(v) in self.model.place:
                    found.setdefault(int(v), k)
        return found

    def _in_rows(self, first: int) -> None:
        """Copies in start after moment first - 1."""
        model, before = self.model, Terms()
        begin = self.clock[self.starts[first]]
        for segment in range(first, self.num_segments):
            reads = self._first_reads(segment)
            work = self._work(range(first, segment + 1))
            for due in _spread(sorted(set(reads.values()))):
                now = [(self.reload(segment, v), -model.in_s[v] / self.unit) for v, k in reads.items() if k <= due]
                self.rows.add([*work, *before, *now], -float(self.clock[due] - begin) / self.unit)
            before += [(self.reload(segment, v), -model.in_s[v] / self.unit) for v in reads]
        everything = [
            (self.reload(k, v), -model.in_s[v] / self.unit)
            for k in range(first, self.num_segments)
            for v in model.movable
        ]
        work = self._work(range(first, self.num_segments))
        self.rows.add([*work, *everything], -float(self.clock[-1] - begin) / self.unit)

    def state(self, x: np.ndarray[tuple[int], np.dtype[np.float64]]) -> State:
        """As in `Build`; what is absent at first and reloaded somewhere is offloaded."""
        state = super().state(x)
        saved = state.saved
        for v in self.model.movable:
            moved = any(x[self.reload(k, v)] > 0.5 for k in range(self.num_segments))
            if moved:
                saved[v] = OFFLOAD
        return State(saved, state.drops)


def _spread(points: list[int]) -> list[int]:
    """At most _NUM_POINTS of them, evenly."""
    if len(points) <= _NUM_POINTS:
        return points
    return [points[i * (len(points) - 1) // (_NUM_POINTS - 1)] for i in range(_NUM_POINTS)]


class OffloadBound:
    """A growing set of moments: `seconds`, the best bound so far; `states`: what the solver proposed on the way."""

    def __init__(self, kernel: JointKernel, link: Link, budget_bytes: int, floor_s: float) -> None:
        self.kernel, self.budget_bytes = kernel, budget_bytes
        self.model = OffloadModel(kernel, link, budget_bytes)
        self.seconds = self.floor_s = floor_s
        self.moments: list[int] = []
        self.states: list[State] = []

    def step(self, deadline_s: float, integral: bool, best_s: float = np.inf) -> bool:
        """Solve with one more moment, the worst step of the last schedule; False when there is none."""
        if len(self.moments) >= _MAX_MOMENTS or not self._add_worst():
            return False
        self.solve(deadline_s, integral, best_s)
        return True

    def solve(self, deadline_s: float, integral: bool, best_s: float = np.inf) -> None:
        """Solve with the moments found so far."""
        left_s = deadline_s - self.kernel.effort.now()
        if left_s <= 0 or not self.moments:
            return
        answer = self.model.solve(self.moments, self.kernel.effort, left_s, integral, False, best_s - self.floor_s)
        self.seconds = max(self.seconds, answer.bound_s + self.floor_s)
        if answer.state is not None:
            self.states.append(answer.state)

    def _add_worst(self) -> bool:
        self.kernel.load(self.states[-1] if self.states else self.kernel.all_saved())
        score = self.kernel.evaluate(self.budget_bytes)
        if score.peak_bytes <= self.budget_bytes or score.worst < 0:
            return False
        moment = int(self.kernel.two_way.steps().segments[score.worst])
        if moment in self.moments:
            return False
        self.moments.append(moment)
        return True
