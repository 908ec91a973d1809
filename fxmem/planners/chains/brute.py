"""Brute-force references for small chains. None of them shares a line with the planners that they judge.

``persistent_s`` is a shortest-path search over memory states: it knows the actions and the rule that a stored value
stays until the backward that reads it last, and nothing of checkpoint recurrences. ``trees`` lists every schedule tree,
and with ``best_offload`` and ``best_joint`` every choice of stored values to move is simulated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from functools import cache

from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.place import place
from fxmem.planners.chains.simulate import Action, simulate
from fxmem.planners.chains.tree import Checkpoint, Save, Tree, compute_actions, save_everything, stored_items

# next backward (L .. 0), kept boundaries, (block, option) of saved blocks, floating boundary (-1: none)
State = tuple[int, frozenset[int], frozenset[tuple[int, int]], int]


def _held(chain: Chain, state: State) -> int:
    gradient, kept, saved, floating = state
    size = chain.resident + (chain.g[gradient] if gradient < chain.num_blocks else 0)
    size += sum(chain.a[i] for i in kept) + sum(chain.options(i)[k].abar for i, k in saved)
    return size + (chain.a[floating] if floating > 0 else 0)


def _forwards(chain: Chain, state: State) -> Iterator[tuple[State, float, int]]:
    """(next state, seconds, peak bytes) of every forward that can run."""
    gradient, kept, saved, floating = state
    stored = {0} | kept | {i + 1 for i, _ in saved}
    for i in range(gradient):
        if (i != floating and i not in stored) or any(block == i for block, _ in saved):
            continue
        loose = floating if floating not in (-1, i) else -1
        held = _held(chain, state) - (chain.a[loose] if loose > 0 else 0)
        keepers = [kept] if i in stored else [kept, kept | {i}]
        for keep in keepers:
            yield (gradient, keep, saved, i + 1), chain.u[i], held + chain.a[i + 1] + chain.wf[i]
        for k, option in enumerate(chain.options(i)):
            yield (
                (gradient, keepers[-1], saved | {(i, k)}, -1),
                option.u,
                held + option.abar + option.wf,
            )


def _backwards(chain: Chain, state: State) -> Iterator[tuple[State, float, int]]:
    """(next state, seconds, peak bytes) of the next backward, if it can run."""
    gradient, kept, saved, floating = state
    i = gradient - 1
    mine = [k for block, k in saved if block == i]
    if not mine or (i > 0 and i not in kept and all(block != i - 1 for block, _ in saved)):
        return
    option = chain.options(i)[mine[0]]
    loose = chain.a[floating] if floating > 0 else 0
    first = chain.g[gradient] if gradient == chain.num_blocks else 0
    peak = _held(chain, state) - loose + first + chain.g[i] + option.wb
    yield (i, kept - {i}, saved - {(i, mine[0])}, -1), option.v, peak


def persistent_s(chain: Chain, budget: int) -> float:
    """Least seconds of any persistent schedule within ``budget`` bytes; infinite if there is none."""
    start: State = (chain.num_blocks, frozenset(), frozenset(), -1)
    best: dict[State, float] = {start: 0.0}
    order = itertools.count()
    heap = [(0.0, next(order), start)]
    while heap:
        spent, _, state = heapq.heappop(heap)
        if state[0] == 0:
            return spent
        if spent > best[state]:
            continue
        for following, seconds, peak in itertools.chain(_forwards(chain, state), _backwards(chain, state)):
            total = spent + seconds
            if peak <= budget and total < best.get(following, math.inf):
                best[following] = total
                heapq.heappush(heap, (total, next(order), following))
    return math.inf


def trees(chain: Chain) -> tuple[Tree, ...]:
    """Every schedule tree of a chain (2, 6, 22, 90, ... for 2, 3, 4, 5 blocks without further saved sets)."""

    @cache
    def stretch(first: int, last: int) -> tuple[Tree, ...]:
        found: list[Tree] = []
        rests: tuple[Tree | None, ...] = stretch(first + 1, last) if last > first else (None,)
        for k in range(len(chain.options(first))):
            found += [Save(first, k, rest) for rest in rests]
        for boundary in range(first + 1, last + 1):
            pairs = itertools.product(stretch(boundary, last), stretch(first, boundary - 1))
            found += [Checkpoint(first, boundary, right, left) for right, left in pairs]
        return tuple(found)

    return stretch(0, chain.num_blocks - 1)


def best_moves(chain: Chain, tree: Tree, budget: int) -> tuple[float, list[Action] | None]:
    """The best choice of stored values to offload for one schedule tree, by trying all of them."""
    compute, items = compute_actions(tree), stored_items(tree)
    best: tuple[float, list[Action] | None] = (math.inf, None)
    for size in range(len(items) + 1):
        for moved in itertools.combinations(items, size):
            actions = place(chain, compute, frozenset(moved), budget)
            if actions is not None and (run := simulate(chain, actions)).time_s < best[0]:
                assert run.peak_bytes <= budget
                best = (run.time_s, actions)
        if size == 0 and best[1] is not None:
            break  # it fits without moving anything
    return best


def best_offload(chain: Chain, budget: int) -> float:
    """Least seconds with everything saved and any set of saved values offloaded."""
    return best_moves(chain, save_everything(chain), budget)[0]


def best_joint(chain: Chain, budget: int) -> float:
    """Least seconds over every persistent schedule and every set of its stored values to offload."""
    return min(best_moves(chain, tree, budget)[0] for tree in trees(chain))
