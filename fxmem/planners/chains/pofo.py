"""POFO: recompute and offload together on a chain.

Beaumont, Eyraud-Dubois, Shilova, "Efficient combination of rematerialization and offloading for training DNNs" (NeurIPS
2021). The chain is walked once from the left. A stretch is either one block saved with one of its options, or several
blocks run ahead to a checkpoint and recomputed later by rotor in the memory that is left then; the value stored at its
end is kept or moved. Partial schedules are fluid labels (``fluid``), thinned by kept and moved bytes. The fastest
become programs, are judged by the exact simulator, and compete with rotor and offload-dp: the result is never worse
than those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from heapq import nsmallest

import numpy as np

from fxmem.planners.chains.fluid import START, Label, Stretch, clocks, extend, history, save_stretch
from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.offload import offload_dp
from fxmem.planners.chains.place import place
from fxmem.planners.chains.rotor import RotorTable, rotor_tree
from fxmem.planners.chains.simulate import Action, ChainRun, ComputeAction, Item, played, simulate
from fxmem.planners.chains.tree import (
    Checkpoint,
    Save,
    Tree,
    advance_peak,
    compute_actions,
    save_everything,
    stored_items,
)

NUM_SLOTS = 200
NUM_BUDGETS = 4  # of a recomputed stretch, between the least memory that works and all that is left
LINK_WEIGHT = 0.2  # of a link's backlog (seconds) in an estimate
CELLS = 20  # per axis (kept, moved)
LABELS_PER_CHAIN = 40_000  # about how many times a label is tried with one stretch, over L**2
NUM_TRIED = 40


class _Search:
    """Labels per boundary for one chain and budget."""

    def __init__(self, chain: Chain, budget: int, effort: int) -> None:
        self.chain, self.budget = chain, budget
        self.room = chain.sub_budget(budget)
        self.width = min(400, max(16, effort // chain.num_blocks**2))
        slots = min(NUM_SLOTS, max(1, self.room))
        self.table = RotorTable(chain, self.room, slots)
        self.stretch = lru_cache(maxsize=None)(self._recomputed)

    def _recomputed(self, first: int, boundary: int, slots: int) -> Stretch:
        """Blocks ``first .. boundary - 1`` run ahead, and later by rotor in ``slots`` slots."""
        chain = self.chain
        return Stretch(
            boundary,
            self.table.elapsed[boundary] - self.table.elapsed[first],
            self.table.best_s(first, boundary - 1, slots),
            advance_peak(chain, first, boundary),
            int(slots * self.table.slot),
            Item("a", boundary),
            chain.a[boundary],
            slots,
        )

    def budgets(self, first: int, boundary: int, most: int) -> list[int]:
        """A few slot counts up to ``most`` at which the stretch's time differs."""
        times = self.table.time[first, boundary - 1, : most + 1]
        steps = np.flatnonzero(np.isfinite(times) & (times != np.concatenate(([np.inf], times[:-1]))))
        if len(steps) <= NUM_BUDGETS:
            return [int(x) for x in steps]
        return [int(steps[k]) for k in np.linspace(0, len(steps) - 1, NUM_BUDGETS).round().astype(int)]

    def stretches(self, first: int, label: Label) -> Iterator[Stretch]:
        """Every way of going on from a label."""
        for number in range(len(self.chain.options(first))):
            yield save_stretch(self.chain, first, number)
        most = int((self.room - label.kept - label.held) / self.table.slot)
        for boundary in range(first + 1, self.chain.num_blocks):
            for slots in self.budgets(first, boundary, most) if most >= 0 else ():
                yield self.stretch(first, boundary, slots)

    def estimate(self, first: int, label: Label) -> float:
        """Seconds of a label finished by rotor without further moves, what was moved being away; maybe infinite."""
        slots = int((self.room - label.kept - label.held) / self.table.slot)
        rest = self.table.best_s(first, self.chain.num_blocks - 1, slots)
        return (
            label.f
            + label.b
            + rest
            + LINK_WEIGHT * (max(0.0, label.f_link - label.f) + max(0.0, label.b_link - label.b))
        )

    def thin(self, first: int, labels: Iterable[Label]) -> list[Label]:
        """Up to twice ``width`` labels: the best by estimate, then the fastest of each cell of (kept, moved)."""
        cells: dict[tuple[int, int, bool], list[Label]] = defaultdict(list)
        scored: dict[tuple[float, ...], tuple[float, int, Label]] = {}
        width = max(1, self.room // CELLS)
        for k, label in enumerate(labels):
            cells[label.kept // width, label.moved // width, label.held > 0].append(label)
            scored.setdefault((label.kept, label.moved, *clocks(label)), (self.estimate(first, label), k, label))
        chosen = [label for score, _, label in nsmallest(self.width, scored.values()) if score < math.inf]
        fastest = (min(cell, key=lambda label: label.f + label.b) for cell in cells.values())
        spread = nsmallest(self.width, ((label.f + label.b, k, label) for k, label in enumerate(fastest)))
        return list({id(label): label for label in (*chosen, *(label for _, _, label in spread))}.values())

    def run(self) -> list[Label]:
        """Complete labels, the fastest by their own clocks first."""
        length = self.chain.num_blocks
        waiting: list[list[Label]] = [[START], *([] for _ in range(length))]
        for first in range(length):
            for label in self.thin(first, waiting[first]):
                for stretch in self.stretches(first, label):
                    is_last = stretch.next == length
                    waiting[stretch.next] += extend(label, stretch, self.room, self.chain.beta, is_last)
        return sorted(waiting[length], key=lambda label: label.f + label.b)

    def tree(self, label: Label) -> tuple[Tree, frozenset[Item]]:
        """The schedule tree and the moved values of a complete label."""
        steps, moved = history(label), set[Item]()
        tree: Tree | None = None
        for k in reversed(range(len(steps))):
            stretch = steps[k].stretch
            assert stretch is not None
            first = steps[k - 1].stretch.next if k else 0  # type: ignore[union-attr]
            if stretch.item.kind == "abar":
                tree = Save(first, stretch.choice, tree)
            else:
                assert tree is not None
                tree = Checkpoint(first, stretch.next, tree, self.table.tree(first, stretch.next - 1, stretch.choice))
            if steps[k].offloaded:
                moved.add(stretch.item)
        assert tree is not None
        return tree, frozenset(moved)


Candidate = tuple[float, list[Action] | None]


def _judge(
    chain: Chain, budget: int, compute: list[ComputeAction], plain: ChainRun, moved: frozenset[Item]
) -> Candidate:
    actions = place(chain, compute, moved, budget, plain)
    return (math.inf, None) if actions is None else (simulate(chain, actions).time_s, actions)


def _polish(chain: Chain, budget: int, tree: Tree, moved: frozenset[Item]) -> Candidate:
    """Toggle which stored values of one schedule tree may move while that makes the program faster."""
    items, run = stored_items(tree), played(chain, compute_actions(tree))
    best = _judge(chain, budget, *run, moved)
    stuck, k = 0, 0
    while stuck < len(items):
        other = moved ^ {items[k % len(items)]}
        trial = _judge(chain, budget, *run, other)
        stuck, k = stuck + 1, k + 1
        if trial[0] < best[0] - 1e-12:
            best, moved, stuck = trial, other, 0
    return best


def pofo(chain: Chain, budget: int, effort: int = LABELS_PER_CHAIN) -> list[Action] | None:
    """The best program found for ``budget`` bytes; None if neither POFO nor rotor nor offload-dp found any."""
    if chain.sub_budget(budget) < 0:
        return None
    search = _Search(chain, budget, effort)
    found = [search.tree(label) for label in search.run()[:NUM_TRIED]]
    recompute = rotor_tree(chain, budget)
    if recompute is not None:
        found.append((recompute, frozenset()))
    found.append((save_everything(chain), frozenset(stored_items(save_everything(chain)))))
    runs = [played(chain, compute_actions(tree)) for tree, _ in found]
    ranked = sorted((_judge(chain, budget, *runs[k], moved)[0], k) for k, (_, moved) in enumerate(found))
    results = [_polish(chain, budget, *found[k]) for seconds, k in ranked[:4] if seconds < math.inf]
    moved = offload_dp(chain, budget)
    if moved is not None:
        results.append((simulate(chain, moved).time_s, moved))
    return min(results, key=lambda result: result[0], default=(math.inf, None))[1]
