"""revolve: binomial checkpointing of a homogeneous chain, and its two-level form with a slow second store.

Griewank and Walther, "Algorithm 799: revolve" (ACM TOMS 26(1), 2000, doi:10.1145/347837.347846); the two-level form is
disk-revolve of Aupy, Herrmann, Hovland and Robert, "Optimal multistage algorithm for adjoint computation" (SIAM J. Sci.
Comput. 38(3), 2016, doi:10.1137/15M1019222). A chain of ``n`` blocks is ``l = n - 1`` steps of their recurrences: the
last block is run in saving mode as part of its backward, and so is every other block when its turn comes. ``c`` slots
hold checkpoints, the chain's input among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.tree import Checkpoint, Save, Tree, promised_peak


def opt_table(steps: int, slots: int, u: float, v: float) -> NDArray[np.float64]:
    """``Opt[c, l]`` for all ``c <= slots``, ``l <= steps`` (seconds); row 0 is finite for l = 0 only.

    A saving forward is part of ``v``: the table counts forwards that only advance, and ``l + 1`` backwards.
    """
    table = np.full((slots + 1, steps + 1), np.inf)
    table[:, 0] = v
    for c in range(1, slots + 1):
        for n in range(1, steps + 1):
            if c == 1 or n == 1:
                table[c, n] = n * (n + 1) / 2 * u + (n + 1) * v
            else:
                ahead = np.arange(1, n)
                table[c, n] = (ahead * u + table[c - 1, n - ahead] + table[c, ahead - 1]).min()
    return table


def extra_forwards(num_blocks: int, slots: int) -> int:
    """Griewank and Walther's closed form: forwards beyond one per block, for ``num_blocks`` with ``slots`` slots."""
    repeats = 0
    while math.comb(slots + repeats, slots) < num_blocks:
        repeats += 1
    return repeats * num_blocks - (math.comb(slots + repeats, repeats - 1) if repeats else 0)


def disk_table(memory: NDArray[np.float64], u: float, v: float, write: float, read: float) -> NDArray[np.float64]:
    """``OptInf[l]``: the last row of ``memory`` (an ``opt_table``) helped by checkpoints on disk, each read once
    (seconds).
    """
    held = memory[-1]
    slots = len(memory) - 1
    best = np.full(len(held), np.inf)
    best[0] = v
    for n in range(1, len(held)):
        ahead = np.arange(1, n if n > 1 else 2)
        to_disk = write + ahead * u + best[n - ahead] + read + held[ahead - 1]
        best[n] = min(held[n], to_disk.min()) if n > 1 or slots == 0 else held[n]
    return best


def revolve_tree(first: int, last: int, slots: int, table: NDArray[np.float64], u: float) -> Tree:
    """The schedule behind ``opt_table`` for blocks ``first .. last`` with ``slots`` slots, ``a_first`` holding one."""
    n = last - first
    if n == 0:
        return Save(first, 0, None)
    if slots == 1:
        return _from_the_start(first, last)
    if n == 1:
        return Checkpoint(first, last, Save(last, 0, None), Save(first, 0, None))
    ahead = np.arange(1, n)
    step = 1 + int((ahead * u + table[slots - 1, n - ahead] + table[slots, ahead - 1]).argmin())
    right = revolve_tree(first + step, last, slots - 1, table, u)
    return Checkpoint(first, first + step, right, revolve_tree(first, first + step - 1, slots, table, u))


def _from_the_start(first: int, last: int) -> Tree:
    """One slot: advance from ``first`` anew for every block; the value reached is stored only while in use."""
    tree: Tree = Save(first, 0, None)
    for block in range(first + 1, last + 1):
        tree = Checkpoint(first, block, Save(block, 0, None), tree)
    return tree


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """A disk-revolve schedule: the tree, and the boundaries whose checkpoints are on disk."""

    tree: Tree
    on_disk: tuple[int, ...]


def disk_revolve_tree(memory: NDArray[np.float64], u: float, v: float, write: float, read: float) -> TwoLevel:
    """The schedule behind ``disk_table(memory, ...)``, of as many blocks as ``memory`` has columns.

    Boundary 0 may be listed as on disk: it is the chain's input, which in fxmem never leaves the device.
    """
    best, slots = disk_table(memory, u, v, write, read), len(memory) - 1
    jumps: list[tuple[int, int]] = []
    first, last = 0, memory.shape[1] - 1
    while (n := last - first) > 1 and best[n] < memory[-1][n]:
        ahead = np.arange(1, n)
        cost = write + ahead * u + best[n - ahead] + read + memory[-1][ahead - 1]
        step = 1 + int(cost.argmin())
        jumps.append((first, first + step))
        first += step
    tree = revolve_tree(first, last, slots, memory, u)
    for start, boundary in reversed(jumps):
        tree = Checkpoint(start, boundary, tree, revolve_tree(start, boundary - 1, slots, memory, u))
    return TwoLevel(tree, tuple(start for start, _ in jumps))


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean: what a homogeneous planner sees of a heterogeneous chain."""
    return math.fsum(values) / len(values)


def fitting_revolve(chain: Chain, budget: int) -> Tree | None:
    """revolve with the most slots whose true peak on this (heterogeneous) chain is within ``budget`` bytes, or None."""
    u, v, length = mean(chain.u), mean(chain.v), chain.num_blocks
    table = opt_table(length - 1, length, u, v)
    for slots in range(length, 0, -1):
        tree = revolve_tree(0, length - 1, slots, table, u)
        if promised_peak(chain, tree) <= budget:
            return tree
    return None
