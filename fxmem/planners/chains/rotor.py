"""rotor: the best persistent schedule of a heterogeneous chain, by dynamic programming over discretised memory.

Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova, "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (arXiv:1911.13214); several saved sets per block as in Rockmate (Zhao et al.,
ICML 2023). ``time[i, l, m]`` is the least time of blocks ``i .. l`` (forward, then backward) with ``m`` slots beside
the input ``a_i``, which whoever stored it has paid for. The gradient ``g_{l+1}`` is there from the start of a stretch,
except of the stretches that end with the last block: the loss gradient appears with the first backward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fxmem.planners.chains.model import Chain, prefix_s
from fxmem.planners.chains.tree import Checkpoint, Save, Tree, promised_peak

Row = NDArray[np.float64]
NUM_SLOTS = 500


class RotorTable:
    """The solved recurrence for one chain and one budget of ``budget`` bytes (resident bytes already taken off)."""

    def __init__(self, chain: Chain, budget: int, num_slots: int = NUM_SLOTS, slot_bytes: float | None = None) -> None:
        """``slot_bytes`` defaults to ``budget / num_slots``, at least one byte: small integer chains are solved
        exactly.
        """
        self.chain = chain
        self.slot = slot_bytes or max(1.0, budget / num_slots)
        self.num = max(0, int(budget / self.slot))
        length = chain.num_blocks
        self.elapsed = prefix_s(chain.u)
        self.time = np.full((length, length, self.num + 1), np.inf)
        self.shifted = np.full((length, length, self.num + 1), np.inf)  # time[j, l] after paying for a_j
        self.pay_a = [self.slots(size) for size in chain.a]
        for last in range(length):
            for first in range(last, -1, -1):
                self._fill(first, last)

    def slots(self, size: float) -> int:
        """Slots that hold ``size`` bytes, rounded up."""
        return int(np.ceil(size / self.slot - 1e-9))

    def waiting(self, last: int) -> int:
        """Bytes of the output gradient during the forwards of a stretch that ends with ``last``."""
        return self.chain.g[last + 1] if last + 1 < self.chain.num_blocks else 0

    def _advance_slots(self, first: int, last: int) -> NDArray[np.int64]:
        """Slots needed to run ahead from ``first`` to each boundary ``first + 1 .. last``."""
        chain, waiting = self.chain, self.waiting(last)
        sizes = [(chain.a[p] if p > first else 0) + chain.a[p + 1] + chain.wf[p] + waiting for p in range(first, last)]
        return np.array([self.slots(size) for size in np.maximum.accumulate(sizes)], dtype=np.int64)

    def _checkpoint_rows(self, first: int, last: int) -> Row:
        """One row per boundary ``first + 1 .. last``: the time when that boundary is the checkpoint."""
        elapsed = np.array(self.elapsed[first + 1 : last + 1]) - self.elapsed[first]
        rows: Row = elapsed[:, None] + self.shifted[first + 1 : last + 1, last] + self.time[first, first:last]
        short = np.arange(self.num + 1)[None, :] < self._advance_slots(first, last)[:, None]
        rows[short] = np.inf
        return rows

    def _save_row(self, first: int, last: int, number: int) -> Row:
        """The time when block ``first`` is saved with its option ``number``."""
        option, chain = self.chain.options(first)[number], self.chain
        backward = chain.g[first + 1] + option.abar + chain.g[first] + option.wb
        need = self.slots(max(self.waiting(last) + option.abar + option.wf, backward))
        row = np.full(self.num + 1, option.u + option.v)
        row[:need] = np.inf
        if last > first:
            row += shift(self.time[first + 1, last], self.slots(option.abar))
        return row

    def _fill(self, first: int, last: int) -> None:
        best = self._save_row(first, last, 0)
        for number in range(1, len(self.chain.options(first))):
            best = np.minimum(best, self._save_row(first, last, number))
        if last > first:
            best = np.minimum(best, self._checkpoint_rows(first, last).min(axis=0))
        self.time[first, last] = best
        self.shifted[first, last] = shift(best, self.pay_a[first])

    def best_s(self, first: int, last: int, num: int) -> float:
        """Least seconds of blocks ``first .. last`` in ``num`` slots; infinite when it can't be done."""
        return float(self.time[first, last, num]) if num >= 0 else np.inf

    def tree(self, first: int, last: int, num: int) -> Tree:
        """The schedule behind ``best_s`` (finite, or the recursion has nothing to follow)."""
        goal = self.best_s(first, last, num)
        for number in range(len(self.chain.options(first))):
            if self._save_row(first, last, number)[num] <= goal:
                left = num - self.slots(self.chain.options(first)[number].abar)
                return Save(first, number, self.tree(first + 1, last, left) if last > first else None)
        boundary = first + 1 + int(self._checkpoint_rows(first, last)[:, num].argmin())
        right = self.tree(boundary, last, num - self.pay_a[boundary])
        return Checkpoint(first, boundary, right, self.tree(first, boundary - 1, num))


def shift(row: Row, num: int) -> Row:
    """The row read ``num`` slots lower: what is left after paying ``num`` slots."""
    moved = np.full_like(row, np.inf)
    if num == 0:
        moved[:] = row
    elif num < len(row):
        moved[num:] = row[:-num]
    return moved


def rotor_tree(chain: Chain, budget: int, num_slots: int = NUM_SLOTS) -> Tree | None:
    """The best persistent schedule found within ``budget`` bytes (resident bytes included), or None.

    Sizes are rounded up to slots, so what the table promises in the budget's own slots never exceeds it. A table a
    little larger is solved, and its schedules are tried from the top: the first whose true peak fits undoes the
    rounding.
    """
    room, last = chain.sub_budget(budget), chain.num_blocks - 1
    if room < 0:
        return None
    slot = max(1.0, room / num_slots)
    extra = chain.num_blocks if slot > 1.0 else 0
    table = RotorTable(chain, int(room + extra * slot), slot_bytes=slot)
    tried = np.inf
    for num in range(table.num, -1, -1):
        seconds = table.best_s(0, last, num)
        if np.isinf(seconds):
            return None
        if seconds != tried and promised_peak(chain, tree := table.tree(0, last, num)) <= budget:
            return tree
        if num > int(room / slot):
            tried = seconds
    return None
