"""Look-ahead eviction over a grid of exponents and virtual budgets, and its noisy variant near the minimum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fxmem.planners.kernel.binding import Kernel, State

Setting = tuple[npt.NDArray[np.float64], int, float]
"""Logs of the score factors, index into EXPONENTS, share of the room added."""
EXPONENTS = ((1.0, 0.5), (0.5, 0.5), (1.0, 1.0), (0.5, 1.0))
_PROPOSE_S = 5e-5  # drawing a setting
SHARES = (0.0, 0.1, 0.2, 0.05, 0.3, 0.5, -0.03)


def evicted_states(
    kernel: Kernel, budget_bytes: int, peak_bytes: int, shares: tuple[float, ...] = SHARES
) -> Iterator[State]:
    """Eviction under budget + share x (all-saved peak - budget): a looser room leaves the last decisions to repair,
    which sees exact costs."""
    for share in shares:
        room = int(budget_bytes + share * (peak_bytes - budget_bytes))
        for alpha, beta in EXPONENTS:
            kernel.evict(room, alpha, beta)
            yield kernel.store()


class NoisyEviction:
    """Hill climbing over the factors on eviction's scores: a few change at a time, kept if not worse."""

    def __init__(self, kernel: Kernel, budget_bytes: int, peak_bytes: int, seed: int) -> None:
        self.kernel, self.budget_bytes, self.peak_bytes = kernel, budget_bytes, peak_bytes
        self.rng = np.random.default_rng(seed)
        self.best = (np.inf, np.zeros(kernel.problem.num_storages), 0, 0.0)

    def propose(self) -> tuple[State, Setting]:
        """A state, and the setting that made it."""
        self.kernel.effort.spend(_PROPOSE_S)
        _, logs, which, share = self.best
        logs = logs.copy()
        changed = self.rng.random(len(logs)) < self._one_of(0.02, 0.05, 0.2)
        logs[changed] = self.rng.normal(size=np.count_nonzero(changed)) * self._one_of(0.5, 1.0, 2.0)
        if self.rng.random() < 0.3:
            which = int(self.rng.integers(len(EXPONENTS)))
        if self.rng.random() < 0.3:
            share = self._one_of(0.0, 0.0, 0.02, 0.05, 0.1, 0.2)
        room = int(self.budget_bytes + share * (self.peak_bytes - self.budget_bytes))
        self.kernel.evict(room, *EXPONENTS[which], np.exp(logs))
        return self.kernel.store(), (logs, which, share)

    def _one_of(self, *values: float) -> float:
        """`Generator.choice` draws the same, but makes an array of them first, which takes longer than all the rest."""
        return values[self.rng.integers(len(values))]

    def accept(self, cost: float, setting: Setting) -> None:
        if cost <= self.best[0]:
            self.best = (cost, *setting)
