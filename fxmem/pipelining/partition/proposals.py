"""Where to cut: dynamic programs over the all-stages table that propose cuts and in-flight counts for the simulator.

`total_time` bounds the step by lead + m * (work + recomputation) per stage; `periodic` bounds the period and takes the
in-flight counts from the delay (1F1B*, Beaumont et al. 2020); `least_memory` only asks what fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fxmem.pipelining.chain import Chain, Cluster, FloatArray
from fxmem.pipelining.curves import IntArray, StageTable
from fxmem.pipelining.evaluate import Cuts

ALPHAS = (1.0, 1.34, 1.67, 2.0, 2.5)
_TIME_FACTORS = (1.0, 1.01, 1.025, 1.05, 1.1, 1.2)
_PERIOD_FACTORS = (1.0, 1.02, 1.06, 1.15)
_NUM_LABELS = 3


class Proposal(NamedTuple):
    cuts: Cuts
    in_flight: tuple[int, ...]


class Times:
    """Times the dynamic programs need: prefix sums of block seconds and link round trips per boundary."""

    def __init__(self, chain: Chain, cluster: Cluster, num_microbatches: int) -> None:
        self.num, self.num_devices, self.length = num_microbatches, cluster.num_devices, len(chain)
        self.work = np.concatenate([[0.0], np.cumsum(chain.columns["total_s"])])
        x = chain.columns["output_bytes"]
        self.link = np.zeros((cluster.num_devices, len(chain) + 1))
        """[s, j]: both directions between stage s and s + 1 if stage s ends at j."""
        for stage in range(cluster.num_devices - 1):
            forth, back = cluster.between(stage, stage + 1), cluster.between(stage + 1, stage)
            self.link[stage, 1:] = [forth.seconds(b) + back.seconds(b) for b in x]


def in_flight_of(alpha: float, num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """n_s = ceil(1 + alpha (P - 1 - s)), at most m; alpha = 1 is 1F1B's own vector."""
    return tuple(min(math.ceil(1 + alpha * (num_stages - 1 - s) - 1e-9), num_microbatches) for s in range(num_stages))


def balanced(weights: FloatArray, num_stages: int) -> Cuts:
    """Contiguous cuts with the least maximum of summed weights, every stage non-empty; exact dynamic program."""
    prefix = np.concatenate([[0.0], np.cumsum(weights)])
    return min_max(prefix[None, :] - prefix[:-1, None], num_stages)


def min_max(cost: FloatArray | Sequence[FloatArray], num_stages: int) -> Cuts:
    """Cuts minimising the largest stage cost; `cost` is [L, L + 1], one for all stages or one per stage. () if none
    fits.
    """
    return _least(cost, num_stages, np.maximum, -np.inf)


def least_squares(cost: FloatArray | Sequence[FloatArray], num_stages: int) -> Cuts:
    """Cuts minimising the sum of squared stage costs, so that the stages below the largest are even too."""
    squares = cost**2 if isinstance(cost, np.ndarray) else [table**2 for table in cost]
    return _least(squares, num_stages, np.add, 0.0)


def _least(cost: FloatArray | Sequence[FloatArray], num_stages: int, joined: np.ufunc, nothing: float) -> Cuts:
    tables = [cost] * num_stages if isinstance(cost, np.ndarray) else list(cost)
    length = tables[0].shape[0]
    upper = np.arange(length + 1)[None, :] <= np.arange(length)[:, None]
    best = np.full(length + 1, np.inf)
    best[0] = nothing
    parents = []
    for table in tables:
        through = np.where(upper, np.inf, joined(best[:-1, None], table))
        parents.append(through.argmin(axis=0))
        best = through.min(axis=0)
    return _trace(parents, length) if np.isfinite(best[length]) else ()


def _trace(parents: Sequence[IntArray], end: int) -> Cuts:
    cuts = [end]
    for parent in reversed(parents):
        cuts.append(int(parent[cuts[-1]]))
    return tuple(reversed(cuts))


def least_memory(table: StageTable, in_flight: Sequence[int], buffered: bool = True) -> Cuts:
    """The cuts whose largest stage needs the fewest bytes under `in_flight`."""
    return min_max([table.least(n, buffered) for n in in_flight], len(in_flight))


def total_time(times: Times, table: StageTable, in_flight: Sequence[int], buffered: bool) -> Iterator[Proposal]:
    """Cuts for a ladder of step times above the least one that the program finds."""
    extras = [table.extra(n, buffered) for n in in_flight]

    def solve(limit_s: float) -> Cuts:
        return _total_time_cuts(times, extras, limit_s)

    for cuts in _ladder(solve, float(times.work[-1]), times.num * float(times.work[-1]), _TIME_FACTORS):
        yield Proposal(cuts, tuple(in_flight))


def _total_time_cuts(times: Times, extras: Sequence[FloatArray], limit_s: float) -> Cuts:
    lead = np.full(times.length + 1, np.inf)
    lead[0] = 0.0
    work = times.work[None, :] - times.work[:-1, None]
    parents = []
    for stage, extra in enumerate(extras):
        before = lead[:-1, None]
        step = times.work[:-1, None] + before + times.num * (work + extra)
        through = np.where(step <= limit_s, before + extra + times.link[stage][None, :], np.inf)
        parents.append(through.argmin(axis=0))
        lead = through.min(axis=0)
    return _trace(parents, times.length) if np.isfinite(lead[times.length]) else ()


def _ladder(solve: Callable[[float], Cuts], low_s: float, high_s: float, factors: Sequence[float]) -> Iterator[Cuts]:
    """Bisect the least feasible limit, then solve at multiples of it; each distinct answer once."""
    for _ in range(8):
        if solve(high_s):
            break
        high_s *= 2
    else:
        return
    while high_s > low_s * 1.002:
        middle = math.sqrt(low_s * high_s)
        low_s, high_s = (low_s, middle) if solve(middle) else (middle, high_s)
    seen: set[Cuts] = set()
    for factor in factors:
        cuts = solve(high_s * factor)
        if cuts and cuts not in seen:
            seen.add(cuts)
            yield cuts


def periodic(times: Times, table: StageTable, buffered: bool, standard: bool) -> Iterator[Proposal]:
    """Cuts and in-flight counts for a ladder of periods above the least feasible one; `standard` keeps 1F1B's
    counts.
    """
    program = _Periodic(times, table, buffered, standard)
    found: dict[Cuts, tuple[int, ...]] = {}

    def solve(period_s: float) -> Cuts:
        proposal = program.solve(period_s)
        if proposal is None:
            return ()
        found[proposal.cuts] = proposal.in_flight
        return proposal.cuts

    for cuts in _ladder(solve, float(times.work[-1]) / times.num_devices, float(times.work[-1]), _PERIOD_FACTORS):
        yield Proposal(cuts, found[cuts])


class _Labels(NamedTuple):
    """Per boundary i and label: delay V, summed recomputation, next cut, label there, in-flight count; shape [L + 1,
    labels].
    """

    delay: FloatArray
    extra: FloatArray
    cut: IntArray
    label: IntArray
    in_flight: IntArray


class _Periodic:
    """Labels (V, sum of recomputation) per stage and first block, last stage first."""

    def __init__(self, times: Times, table: StageTable, buffered: bool, standard: bool) -> None:
        self.times, self.standard = times, standard
        self.most = min(2 * times.num_devices, times.num)
        self.extras = np.stack([table.extra(n, buffered) for n in range(1, self.most + 1)])
        length = times.length
        self.work = times.work[None, :] - times.work[:length, None]
        self.i, self.j = np.arange(length)[:, None, None], np.arange(length + 1)[None, :, None]

    def solve(self, period_s: float) -> Proposal | None:
        length, num = self.times.length, self.times.num_devices
        empty = np.zeros((length + 1, _NUM_LABELS), dtype=np.intp)
        delay = np.full((length + 1, _NUM_LABELS), np.inf)
        delay[length, 0] = 0.0
        levels = [_Labels(delay, np.where(np.isfinite(delay), 0.0, np.inf), empty, empty, empty)]
        for stage in range(num - 1, -1, -1):
            levels.append(self._stage(levels[-1], stage, period_s))
        if not np.isfinite(levels[-1].delay[0, 0]):
            return None
        return self._trace(levels)

    def _stage(self, after: _Labels, stage: int, period_s: float) -> _Labels:
        delay = after.delay[None, :, :]
        work = self.work[:, :, None]
        limit = self.times.num_devices - stage
        groups = (
            np.full(delay.shape, min(limit, self.most))
            if self.standard
            else self._groups(_plus(delay, work, period_s), period_s)
        )
        for _ in range(2):
            extra = self.extras[np.minimum(groups, self.most) - 1, self.i, self.j]
            total = _plus(delay, work + extra, period_s)
            groups = groups if self.standard else np.maximum(groups, self._groups(total, period_s))
        extra = self.extras[np.minimum(groups, self.most) - 1, self.i, self.j]
        total = _plus(delay, work + extra, period_s)
        allowed = (work + extra <= period_s) & (groups <= self.most)
        total = np.where(allowed, total, np.inf)
        if stage:
            link = self.times.link[stage - 1][:-1][:, None, None]
            total = np.where(link <= period_s, _plus(total, np.broadcast_to(link, total.shape), period_s), np.inf)
        return self._pick(total, after.extra[None, :, :] + extra, np.broadcast_to(groups, total.shape))

    @staticmethod
    def _groups(delay: FloatArray, period_s: float) -> IntArray:
        finite = np.where(np.isfinite(delay), delay, 0.0)
        return np.maximum(np.ceil(finite / period_s - 1e-9), 1).astype(np.intp)

    def _pick(self, delay: FloatArray, extra: FloatArray, groups: IntArray) -> _Labels:
        """The labels of least delay, least recomputation and least sum for each first block."""
        length = self.times.length
        flat_delay = delay.reshape(length, -1)
        flat_extra = np.where(np.isfinite(flat_delay), extra.reshape(length, -1), np.inf)
        rows = np.arange(length)
        picks = np.stack(
            [flat_delay.argmin(axis=1), flat_extra.argmin(axis=1), (flat_delay + flat_extra).argmin(axis=1)], axis=1
        )
        at = rows[:, None], picks
        cut, label = picks // _NUM_LABELS, picks % _NUM_LABELS
        columns = (flat_delay[at], flat_extra[at], cut, label, groups.reshape(length, -1)[at])
        fills = (np.inf, np.inf, 0, 0, 0)
        return _Labels(
            *(
                np.concatenate([c, np.full((1, _NUM_LABELS), f, dtype=c.dtype)])
                for c, f in zip(columns, fills, strict=True)
            )
        )

    @staticmethod
    def _trace(levels: Sequence[_Labels]) -> Proposal:
        first = levels[-1]
        label = int(first.extra[0].argmin())
        cut, cuts, counts = 0, [0], []
        for level in reversed(levels[1:]):
            counts.append(int(level.in_flight[cut, label]))
            cut, label = int(level.cut[cut, label]), int(level.label[cut, label])
            cuts.append(cut)
        return Proposal(tuple(cuts), tuple(max(counts[s:]) for s in range(len(counts))))


def _plus(delay: FloatArray, work: FloatArray, period_s: float) -> FloatArray:
    """V (+) U: work that would cross a multiple of the period waits for it."""
    with np.errstate(invalid="ignore"):
        total = delay + work
        groups = np.maximum(np.ceil(delay / period_s - 1e-9), 1.0)
        crosses = np.ceil(total / period_s - 1e-9) > groups
        return np.where(np.isfinite(total), np.where(crosses, period_s * groups + work, total), np.inf)
