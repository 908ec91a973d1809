"""The moment MILP: backward cut at a few kernels ("moments"), memory constrained only there.

Segment k ends with moment k, the last one with backward. Booleans: keep[k, v], storage v is alive when segment k
starts; run[k, o], forward kernel o is recomputed in segment k; first[o], kernel o, which only backward needs, runs in
forward too.

    keep[k+1, v] <= keep[k, v] + run[k, producer v]              a value comes from somewhere
    keep[k, v] + run[k, producer v] >= 1                         if backward reads v in segment k
    run[k, o] <= keep[k, u] + run[k, producer u]                 for each operand u of o
    sum bytes(v) keep[k+1, v] <= room - fixed[k]                 at each moment, v not read there
    min sum seconds(o) run[k, o] - sum seconds(o) (1 - first[o])

Every schedule in the captured backward order that recomputes forward kernels in backward satisfies these, so the
optimum (and its linear relaxation) bounds the extra seconds from below; the more moments, the tighter. Storages too
small to be decided about are taken to be always there at no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array, csc_array

from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import State
from fxmem.planners.problem import Problem
from fxmem.planners.solver import minimise

_STEP = 1e4  # a step in the solver's objective: its tolerances are absolute, and a step may take microseconds
_ENTRY_S = 1e-6  # to write down an entry of the constraints
_TIE_S_PER_BYTE = 1e-11  # relative to the step's seconds: of equal plans prefer the one that holds fewer bytes


@dataclass(frozen=True)
class Answer:
    """`bound_s`: no schedule adds less (inf: none exists); `state`: the schedule of the best solution, if any (rounded
    when it is fractional). `proven`: the solver closed its gap."""

    bound_s: float
    state: State | None
    proven: bool


@dataclass
class _Rows:
    """Sparse constraints low <= row x, one at a time."""

    rows: list[int] = field(default_factory=list)
    cols: list[int] = field(default_factory=list)
    data: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)

    def add(self, terms: Sequence[tuple[int, float]], low: float) -> None:
        """sum coefficient * x[column] >= low; a negative column is a constant 1 times its coefficient."""
        row = len(self.low)
        for column, coefficient in terms:
            if column < 0:
                low -= coefficient
            else:
                self.rows.append(row)
                self.cols.append(column)
                self.data.append(coefficient)
        self.low.append(low)


class MomentModel:
    """The MILP of one problem and budget; moments are kernels (forward ones constrain what crosses the boundary)."""

    def __init__(self, problem: Problem, cand: npt.NDArray[np.uint8], budget_bytes: int) -> None:
        self.problem = problem
        self.room = budget_bytes - problem.base_bytes
        nf = problem.num_forward
        made = problem.producer
        forward = (made >= 0) & (made < nf)
        self.always = ~forward | problem.keep_to_end
        self.always |= forward & problem.recomputable[np.maximum(made, 0)] & ~cand.astype(np.bool_)
        self.cand = cand
        self.required = required_kernels(problem)
        self.values, self.kernels = self._relevant()
        self.value_at = {v: i for i, v in enumerate(self.values)}
        self.kernel_at = {o: i for i, o in enumerate(self.kernels)}
        self.last_reader = last_readers(problem, range(problem.num_kernels))
        self.last_forward = last_readers(problem, np.flatnonzero(self.required).tolist())

    def _relevant(self) -> tuple[list[int], list[int]]:
        """Storages backward may need and kernels it may run again."""
        p = self.problem
        open_values = [int(s) for k in range(p.num_forward, p.num_kernels) for s in p.reads(k) if not self.always[s]]
        values, kernels = set(open_values), set[int]()
        while open_values:
            kernel = int(p.producer[open_values.pop()])
            if kernel in kernels:
                continue
            kernels.add(kernel)
            if p.recomputable[kernel]:
                new = {int(u) for u in p.reads(kernel) if not self.always[u]} - values
                values |= new
                open_values += new
        return sorted(values), sorted(kernels)

    def fixed_bytes(self, moment: int) -> tuple[int, set[int]]:
        """Bytes above base that stand at `moment` whatever is decided, and the storages that it reads or writes."""
        p = self.problem
        touched = {int(s) for s in (*p.reads(moment), *p.writes(moment))}
        before = (p.producer >= 0) & (p.producer < moment)
        if moment >= p.num_forward:
            before &= p.keep_to_end | ((p.producer >= p.num_forward) & (self.last_reader > moment))
        else:
            before &= p.keep_to_end | (self.last_forward > moment)
        before[list(touched)] = True
        return int(p.nbytes[before].sum() + p.workspace_bytes[moment]), touched

    def build(self, backward: list[int], forward: list[int]) -> Build:
        """The MILP with these moments."""
        return Build(self, backward, forward)

    def solve(
        self,
        moments: Sequence[int],
        effort: Effort,
        limit_s: float,
        integral: bool = True,
        tie: bool = False,
        cutoff_s: float = np.inf,
    ) -> Answer:
        """Optimise with memory constrained at `moments` only, looking only for plans that add less than `cutoff_s`,
        for `limit_s` seconds of `effort`."""
        backward = sorted({m for m in moments if m >= self.problem.num_forward})
        build = self.build(backward, [m for m in moments if m < self.problem.num_forward])
        if not build.feasible:
            return Answer(np.inf, None, True)
        if np.isfinite(cutoff_s):
            build.add_cutoff(cutoff_s)
        cost, rows = build.cost.copy(), build.rows
        if tie:
            cost[: build.num_keep] += _TIE_S_PER_BYTE * self.problem.baseline_s * build.keep_bytes
        entries = (np.array(rows.data), (np.array(rows.rows), np.array(rows.cols)))
        matrix = csc_array(coo_array(entries, shape=(len(rows.low), len(cost))))
        effort.spend(_ENTRY_S * len(rows.data))
        scale = _STEP / max(self.problem.baseline_s, 1e-30)
        integrality = (np.arange(len(cost)) < build.num_integral) & integral
        result = minimise(cost * scale, matrix, np.array(rows.low), build.upper, integrality, effort, limit_s)
        if result.bound == np.inf:
            return Answer(cutoff_s, None, True)
        bound = result.bound / scale + build.offset
        if tie:  # what the tie-break can have added at most
            bound -= _TIE_S_PER_BYTE * self.problem.baseline_s * float(build.keep_bytes.sum())
        state = build.state(result.x) if result.x is not None else None
        return Answer(min(bound, cutoff_s), state, result.is_optimal)


class Build:
    """Variables, constraints, objective and extraction for one list of moments."""

    def __init__(self, model: MomentModel, backward: list[int], forward: list[int]) -> None:
        self.model, self.moments = model, backward
        self.num_segments = len(backward) + 1
        self.num_values, self.num_kernels = len(model.values), len(model.kernels)
        self.num_keep = self.num_segments * self.num_values
        num_run = self.num_segments * self.num_kernels
        size = self.num_keep + num_run + self.num_kernels
        p = model.problem
        seconds = p.seconds[model.kernels] if model.kernels else np.zeros(0)
        optional = np.array([not model.required[o] for o in model.kernels], dtype=np.bool_)
        self.cost = np.concatenate([np.zeros(self.num_keep), np.tile(seconds, self.num_segments), seconds * optional])
        self.offset = -float((seconds * optional).sum())
        self.keep_bytes = np.tile(p.nbytes[model.values], self.num_segments).astype(np.float64)
        self.upper = np.ones(size)
        again = p.recomputable[model.kernels] if model.kernels else np.zeros(0)
        self.upper[self.num_keep : self.num_keep + num_run] = np.tile(again, self.num_segments)
        self.rows, self.feasible, self.num_integral = _Rows(), True, size
        self.add_columns()
        self._forward_rows()
        for segment in range(self.num_segments):
            self._segment_rows(segment)
        for moment in forward:
            self._forward_memory(moment)

    def add_columns(self) -> None:
        """Continuous variables of models built on this one: append to `cost` and `upper`."""

    def keep(self, segment: int, v: int) -> int:
        """Column of keep[segment, v]; -1 if v is always there."""
        return -1 if self.model.always[v] else segment * self.num_values + self.model.value_at[v]

    def run(self, segment: int, o: int) -> int:
        return self.num_keep + segment * self.num_kernels + self.model.kernel_at[o]

    def first(self, o: int) -> int:
        if self.model.required[o]:
            return -1
        return self.num_keep + self.num_segments * self.num_kernels + self.model.kernel_at[o]

    def add_cutoff(self, cutoff_s: float) -> None:
        """Only plans that add at most `cutoff_s`, with a little slack for the solver's tolerances."""
        unit = max(self.model.problem.baseline_s, 1e-30)
        terms = [(int(i), -float(self.cost[i]) / unit) for i in np.flatnonzero(self.cost)]
        self.rows.add(terms, (self.offset - cutoff_s) / unit - 1e-6)

    def _forward_rows(self) -> None:
        p = self.model.problem
        for v in self.model.values:
            self.rows.add([(self.first(int(p.producer[v])), 1.0), (self.keep(0, v), -1.0)], 0.0)
        for o in self.model.kernels:
            for u in p.reads(o):
                if (
                    not self.model.required[o]
                    and not self.model.always[u]
                    and int(p.producer[u]) in self.model.kernel_at
                ):
                    self.rows.add([(self.first(int(p.producer[u])), 1.0), (self.first(o), -1.0)], 0.0)

    def _source(self, segment: int, v: int) -> list[tuple[int, float]]:
        made = int(self.model.problem.producer[v])
        return [(self.keep(segment, v), 1.0), (self.run(segment, made), 1.0)]

    def _segment_rows(self, segment: int) -> None:
        model, p = self.model, self.model.problem
        start = p.num_forward if segment == 0 else self.moments[segment - 1] + 1
        end = p.num_kernels if segment == len(self.moments) else self.moments[segment] + 1
        needed = {int(s) for k in range(start, end) for s in p.reads(k)}
        for v in sorted(needed):
            if not model.always[v]:
                self.rows.add(self._source(segment, v), 1.0)
        for o in model.kernels:
            for u in p.reads(o) if p.recomputable[o] else ():
                if not model.always[u]:
                    self.rows.add([*self._source(segment, int(u)), (self.run(segment, o), -1.0)], 0.0)
        if segment < len(self.moments):
            for v in model.values:
                self.rows.add([*self._source(segment, v), (self.keep(segment + 1, v), -1.0)], 0.0)
            self._memory(self.moments[segment], segment + 1, model.values)

    def _memory(self, moment: int, segment: int, values: Sequence[int]) -> None:
        fixed, touched = self.model.fixed_bytes(moment)
        scale = float(max(self.model.room, 1))
        if fixed > self.model.room:
            self.feasible = False
        nbytes = self.model.problem.nbytes
        terms = [(self.keep(segment, v), -float(nbytes[v]) / scale) for v in values if v not in touched]
        self.rows.add(terms, (fixed - self.model.room) / scale)

    def _forward_memory(self, moment: int) -> None:
        p = self.model.problem
        if self.model.required[moment]:
            standing = self.model.last_forward > moment
            self._memory(moment, 0, [v for v in self.model.values if p.producer[v] < moment and not standing[v]])

    def state(self, x: npt.NDArray[np.float64]) -> State:
        model, p = self.model, self.model.problem
        keep = x[: self.num_keep].reshape(self.num_segments, self.num_values) > 0.5
        saved = np.ones(p.num_storages, dtype=np.uint8)
        saved[model.values] = keep[0]
        saved[model.cand == 0] = 1
        values = np.array(model.values, dtype=np.int64)
        drops = []
        for k, moment in enumerate(self.moments):
            gone = values[~keep[k + 1]]
            drops += [(moment, int(v)) for v in gone if model.cand[v]]
        return State(saved, tuple(drops))


def required_kernels(problem: Problem) -> npt.NDArray[np.bool_]:
    """Forward kernels that run in forward whatever is decided: with effects, returned, or needed by such."""
    need = problem.keep_to_end.copy()
    required = np.zeros(problem.num_forward, dtype=np.bool_)
    for k in range(problem.num_forward - 1, -1, -1):
        required[k] = problem.must_run[k] or bool(need[problem.writes(k)].any())
        if required[k]:
            need[problem.reads(k)] = True
    return required


def last_readers(problem: Problem, kernels: Iterable[int]) -> npt.NDArray[np.int64]:
    """The last of `kernels` (ascending) to read each storage; -1 for none."""
    last = np.full(problem.num_storages, -1, dtype=np.int64)
    for k in kernels:
        last[problem.reads(k)] = k
    return last
