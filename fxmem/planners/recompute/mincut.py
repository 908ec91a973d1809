"""A family of minimum cuts: which storages to keep when bytes have a price at every backward step.

Source -> storage (infinite) if backward reads it; kernel -> each operand (infinite); kernel -> sink at its seconds
(infinite if it may not run twice); storage -> producer at the price of keeping it instead of recomputing it: bytes x
(prices summed from the start of backward to its last use, minus those between first and last use). A storage on the
source side is needed in backward; cutting storage -> producer keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from fxmem.planners.kernel.binding import Kernel, Score, State
from fxmem.planners.problem import IntArray, Problem

FloatArray = npt.NDArray[np.float64]
_CUT_S, _ARC_S = 7e-4, 1e-7  # what a cut takes, and so much more per arc
_SCALE = 2**28  # SciPy's flows are 32-bit: the finite capacities add up to this


@dataclass(frozen=True)
class Uses:
    """Per storage: backward positions (0 = first backward kernel) of its first and last use if it were kept; -1 for
    none. `direct`: backward itself reads it."""

    first: IntArray
    last: IntArray
    direct: npt.NDArray[np.bool_]


def uses(problem: Problem) -> Uses:
    """First and last potential backward use of every forward storage, through the consumers recompute may run."""
    nf = problem.num_forward
    first = np.full(problem.num_storages, -1, dtype=np.int64)
    last = np.full(problem.num_storages, -1, dtype=np.int64)
    for kernel in range(nf, problem.num_kernels):
        for s in problem.reads(kernel):
            if first[s] < 0:
                first[s] = kernel - nf
            last[s] = kernel - nf
    direct = first >= 0
    for kernel in range(nf - 1, -1, -1):
        served = [first[o] for o in problem.writes(kernel) if first[o] >= 0]
        if not served:
            continue
        soonest = min(served)
        for s in problem.reads(kernel):
            last[s] = max(last[s], soonest)
            first[s] = soonest if first[s] < 0 else min(first[s], soonest) if not direct[s] else first[s]
    return Uses(first, last, direct)


class CutFamily:
    """The flow network of one problem; `cut(prices)` keeps the storages of its minimum cut."""

    def __init__(self, kernel: Kernel) -> None:
        self.problem = problem = kernel.problem
        self.cand = kernel.cand.astype(np.bool_)
        self.effort = kernel.effort
        self.uses = uses(problem)
        nf, num_storages = problem.num_forward, problem.num_storages
        self.storages = np.flatnonzero((problem.producer >= 0) & (problem.producer < nf) & (self.uses.first >= 0))
        self.source, self.sink = num_storages + nf, num_storages + nf + 1
        rows: list[int] = []
        cols: list[int] = []
        for s in self.storages[self.uses.direct[self.storages]]:
            rows.append(self.source)
            cols.append(int(s))
        for reader in range(nf):
            for s in problem.reads(reader):
                rows.append(num_storages + reader)
                cols.append(int(s))
        self.num_infinite = len(rows)
        rows += [num_storages + k for k in range(nf)]
        cols += [self.sink] * nf
        rows += self.storages.tolist()
        cols += (num_storages + problem.producer[self.storages]).tolist()
        self.rows, self.cols = np.array(rows), np.array(cols)

    def keep_prices(self, prices: FloatArray) -> FloatArray:
        """Seconds asked for keeping each of `storages`, at `prices` (seconds per byte) per backward position."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        first, last = self.uses.first[self.storages], self.uses.last[self.storages]
        spared = np.where(self.uses.direct[self.storages], total[last + 1] - total[first], 0.0)
        cost: FloatArray = self.problem.nbytes[self.storages] * (total[last + 1] - spared)
        return np.where(self.cand[self.storages], cost, 0.0)

    def cut(self, prices: FloatArray) -> State:
        """The state that keeps what the minimum cut at these prices keeps."""
        p = self.problem
        self.effort.spend(_CUT_S + _ARC_S * len(self.rows))
        seconds = p.seconds[: p.num_forward]
        keep = self.keep_prices(prices)
        unit = max(float(seconds.sum() + keep.sum()), 1e-30) / _SCALE
        infinite = np.int64(2**30)
        run_again = np.where(p.recomputable[: p.num_forward], np.ceil(seconds / unit) + 1, infinite)
        finite = np.concatenate([run_again, np.round(keep / unit)]).astype(np.int64)
        capacity = np.concatenate([np.full(self.num_infinite, infinite), np.minimum(finite, infinite)]).astype(np.int32)
        size = self.sink + 1
        network = csr_array((capacity, (self.rows, self.cols)), shape=(size, size))
        residual = csr_array(network - maximum_flow(network, self.source, self.sink).flow)
        residual.data = np.maximum(residual.data, 0)
        residual.eliminate_zeros()
        reached = np.zeros(size, dtype=np.bool_)
        reached[breadth_first_order(residual, self.source, return_predecessors=False)] = True
        kept = reached[self.storages] & ~reached[p.num_storages + p.producer[self.storages]]
        saved = np.zeros(p.num_storages, dtype=np.uint8)
        saved[self.storages[kept]] = 1
        saved[~self.cand] = 1
        return State(saved)


def cut_states(
    kernel: Kernel, family: CutFamily, budget_bytes: int, directions: int = 6, steps: int = 10
) -> Iterator[tuple[Score, State]]:
    """Cuts whose prices start at the worst step of the all-saved schedule and move to the worst overflow; the scale
    of each direction is bisected between cuts that fit and cuts that do not."""
    problem = kernel.problem
    kernel.load(kernel.all_saved())
    score = kernel.evaluate(budget_bytes)
    direction = _at_worst(kernel, score)
    unit = float(problem.seconds.sum()) / max(float(problem.nbytes[family.cand].sum()), 1.0)
    for _ in range(directions):
        low, high = unit * 1e-4, unit * 1e3
        closest: FloatArray | None = None
        for _ in range(steps):
            scale = float(np.sqrt(low * high))
            state = family.cut(direction * scale)
            kernel.load(state)
            score = kernel.evaluate(budget_bytes)
            if score.peak_bytes > budget_bytes:
                low = scale
                closest = _at_worst(kernel, score)
            else:
                high = scale
            yield score, kernel.store()  # last: whoever takes it may use the kernel meanwhile
        if closest is None:
            break
        direction = 0.6 * direction + 0.4 * closest


def _at_worst(kernel: Kernel, score: Score) -> FloatArray:
    """A unit price on the backward position where the evaluated state stands highest."""
    nf = kernel.problem.num_forward
    position = 0 if score.worst < 0 else int(kernel.steps().segments[score.worst]) - nf
    prices = np.zeros(kernel.problem.num_kernels - nf)
    prices[position] = 1.0
    return prices
