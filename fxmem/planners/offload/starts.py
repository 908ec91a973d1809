"""Where the joint planner starts from: everything kept, everything offloaded, recompute-only plans of looser budgets,
eviction, and minimum cuts in which offloading has a price too."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fxmem.planners.kernel.binding import State
from fxmem.planners.kernel.joint import OFFLOAD, JointKernel
from fxmem.planners.recompute.evict import evicted_states
from fxmem.planners.recompute.mincut import CutFamily, FloatArray, cut_states

_VIRTUAL_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)
_LATENESS = (0.0, 0.05, 1.0)
_PRICES = (0.05, 0.2, 0.5, 1.0, 2.0, 3.0)


class JointCutFamily(CutFamily):
    """Minimum cuts whose price of having a storage is the cheaper of keeping it and offloading it."""

    def __init__(self, kernel: JointKernel) -> None:
        super().__init__(kernel.two_way)
        self.can = kernel.can.astype(np.bool_)
        self.offload_prices: FloatArray | None = None

    def keep_prices(self, prices: FloatArray) -> FloatArray:
        """As in `CutFamily`, where offloading is no cheaper."""
        cost = super().keep_prices(prices)
        return cost if self.offload_prices is None else np.minimum(cost, self.offload_prices)

    def cut_three_ways(self, prices: FloatArray, offload_s: FloatArray) -> State:
        """The cut at `prices` (seconds per byte, by backward position) with `offload_s` seconds asked per storage."""
        self.offload_prices = np.where(self.can, offload_s, np.inf)[self.storages]
        saved = self.cut(prices).saved
        self.offload_prices = None
        dearer = self.keep_prices(prices) > np.where(self.can, offload_s, np.inf)[self.storages]
        away = self.storages[dearer]
        saved[away] = np.where(saved[away] == 1, OFFLOAD, saved[away])
        return State(saved)


def first_states(kernel: JointKernel, family: JointCutFamily, budget_bytes: int, peak_bytes: int) -> Iterator[State]:
    """Cheap starts, the ones that tend to pay first."""
    yield kernel.all_saved()
    yield kernel.all_offloaded()
    two_way = kernel.two_way
    yield from evicted_states(two_way, budget_bytes, peak_bytes, (0.0, 0.25))
    for share in _VIRTUAL_SHARES:
        yield from _cuts(kernel, family, int(budget_bytes + share * (peak_bytes - budget_bytes)))
    yield from evicted_states(two_way, budget_bytes, peak_bytes, (0.1, 0.5, 0.75))


def _cuts(kernel: JointKernel, family: JointCutFamily, budget_bytes: int) -> list[State]:
    """The cheapest recompute-only cuts that fit in a looser budget, and the one nearest above it."""
    found = list(cut_states(kernel.two_way, family, budget_bytes, directions=2, steps=7))
    fitting = sorted((c for c in found if c[0].peak_bytes <= budget_bytes), key=lambda c: c[0].extra_s)
    above = sorted((c for c in found if c[0].peak_bytes > budget_bytes), key=lambda c: c[0].peak_bytes)
    return [state for _, state in (*fitting[:1], *above[:1])]


def three_way_states(kernel: JointKernel, family: JointCutFamily, budget_bytes: int) -> Iterator[State]:
    """Cuts over a grid of prices of offloading: per byte on the link, more for what is produced late."""
    problem = kernel.problem
    kernel.load(kernel.all_saved())
    worst = kernel.evaluate(budget_bytes).worst
    nf = problem.num_forward
    position = 0 if worst < 0 else int(kernel.two_way.steps().segments[worst]) - nf
    clock = np.cumsum(problem.seconds) / max(problem.baseline_s, 1e-30)
    made = np.where(problem.producer >= 0, clock[np.maximum(problem.producer, 0)], 0.0)
    seconds = problem.nbytes / min(kernel.link.in_bytes_per_s, kernel.link.out_bytes_per_s)
    unit = problem.baseline_s / max(float(problem.nbytes[family.storages].sum()), 1.0)
    for lateness in _LATENESS:
        for price in _PRICES:
            for scale in (0.5, 2.0, 8.0):
                prices = np.zeros(problem.num_kernels - nf)
                prices[position] = scale * unit
                yield family.cut_three_ways(prices, price * seconds * (1 + lateness * made / max(made.max(), 1e-30)))
