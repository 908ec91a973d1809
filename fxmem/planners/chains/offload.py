"""Offloading a chain with everything saved: two relaxations, the exact simulator, and a lower bound.

*Greedy*: with continuous freeing the earliest values are the ones to move, until the deficit is covered. *DP*: fluid
freeing but whole values (``fluid``). Both selections become programs (``place``), the simulator judges both and the
better is kept. Beaumont, Eyraud-Dubois, Shilova (Euro-Par 2020, doi:10.1007/978-3-030-57675-2_10); the problem is
strongly NP-hard.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import pairwise

from fxmem.planners.chains.fluid import START, Label, extend, history, save_stretch, undominated
from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.place import place
from fxmem.planners.chains.simulate import Action, ChainRun, ComputeAction, Item, played, simulate
from fxmem.planners.chains.tree import compute_actions, save_everything

LABELS = {16: (24, 192), 1 << 30: (6, 96)}  # up to so many blocks: labels per (moved, held), such keys per block
NUM_TRIED = 24
GRID = 512


def saved_items(chain: Chain) -> list[Item]:
    """What can be moved when every block is saved: all but the last block's set, which is needed at once."""
    return [Item("abar", i) for i in range(chain.num_blocks - 1)]


def greedy_selection(chain: Chain, budget: int) -> frozenset[Item]:
    """The earliest saved sets whose bytes cover the deficit of the worst moment."""
    room, stored, deficit = chain.sub_budget(budget), 0, 0
    for block in range(chain.num_blocks):
        stretch = save_stretch(chain, block, 0)
        deficit = max(deficit, stored + max(stretch.forward, stretch.backward) - room)
        stored += chain.abar[block]
    chosen: list[Item] = []
    for item in saved_items(chain):
        if deficit <= 0:
            break
        chosen.append(item)
        deficit -= chain.abar[item.at]
    return frozenset(chosen)


def _thin(labels: Iterable[Label], per_key: int, most_keys: int) -> list[Label]:
    """Keep the best labels of each (moved, held); of too many keys, those with the fastest labels."""
    groups: dict[tuple[int, int], list[Label]] = defaultdict(list)
    for label in labels:
        groups[label.moved, label.held].append(label)
    thinned = [undominated(group, per_key) for group in groups.values()]
    if len(thinned) > most_keys:
        thinned.sort(key=lambda group: group[0].moved)  # the fastest of each neighbourhood
        step = len(thinned) / most_keys
        cuts = [int(k * step) for k in range(most_keys + 1)]
        parts = [thinned[low:high] for low, high in pairwise(cuts)]
        thinned = [min(part, key=lambda group: group[0].f + group[0].b) for part in parts]
    return [label for group in thinned for label in group]


def dp_selections(chain: Chain, budget: int) -> list[frozenset[Item]]:
    """Selections of the fluid DP, the fastest by its own clocks first, at most ``NUM_TRIED``."""
    room, labels, last = chain.sub_budget(budget), [START], chain.num_blocks - 1
    limits = next(limits for most, limits in LABELS.items() if chain.num_blocks <= most)
    for block in range(chain.num_blocks):
        stretch = save_stretch(chain, block, 0)
        grown = (new for label in labels for new in extend(label, stretch, room, chain.beta, block == last))
        labels = _thin(grown, *limits)
    labels.sort(key=lambda label: label.f + label.b)
    chosen = [
        frozenset(step.stretch.item for step in history(label) if step.offloaded and step.stretch) for label in labels
    ]
    return list(dict.fromkeys(chosen))[:NUM_TRIED]


@lru_cache(maxsize=8)
def _saving(chain: Chain) -> tuple[list[ComputeAction], ChainRun]:
    return played(chain, compute_actions(save_everything(chain)))


def evaluate(chain: Chain, budget: int, selection: Collection[Item]) -> tuple[float, list[Action] | None]:
    """Exact seconds and program of one selection; infinite and None if it does not fit."""
    compute, plain = _saving(chain)
    actions = place(chain, compute, selection, budget, plain)
    return (math.inf, None) if actions is None else (simulate(chain, actions).time_s, actions)


def polish(chain: Chain, budget: int, selection: frozenset[Item]) -> tuple[float, list[Action] | None]:
    """Toggle one value at a time while that makes the program faster."""
    best, items, stuck, k = evaluate(chain, budget, selection), saved_items(chain), 0, 0
    while items and stuck < len(items):
        other = selection ^ {items[k % len(items)]}
        trial = evaluate(chain, budget, other)
        stuck, k = stuck + 1, k + 1
        if trial[0] < best[0] - 1e-12:
            best, selection, stuck = trial, other, 0
    return best


def best_selection(
    chain: Chain, budget: int, selections: Iterable[frozenset[Item]]
) -> tuple[float, list[Action] | None]:
    """The best of some selections in the exact simulator, after toggling values of the two best."""
    ranked = sorted(((evaluate(chain, budget, chosen)[0], k, chosen) for k, chosen in enumerate(selections)))
    polished = (polish(chain, budget, chosen) for seconds, _, chosen in ranked[:2] if seconds < math.inf)
    return min(polished, key=lambda x: x[0], default=(math.inf, None))


def greedy(chain: Chain, budget: int) -> list[Action] | None:
    """offload-greedy: the earliest values that cover the deficit; one more at a time while that does not fit."""
    order, start = saved_items(chain), len(greedy_selection(chain, budget))
    for num in range(start, len(order) + 1):
        if (actions := evaluate(chain, budget, frozenset(order[:num]))[1]) is not None:
            return actions
    return None


def offload_all(chain: Chain, budget: int) -> list[Action] | None:
    """offload-all: every value may be moved; those whose bytes are never missed stay."""
    return evaluate(chain, budget, frozenset(saved_items(chain)))[1]


def offload_dp(chain: Chain, budget: int) -> list[Action] | None:
    """offload-dp: the best in the exact simulator of the DP's selections, the greedy one and all-of-them."""
    order = saved_items(chain)
    start = len(greedy_selection(chain, budget))
    prefixes = [frozenset(order[:num]) for num in range(start, min(start + 2, len(order)) + 1)]
    return best_selection(chain, budget, [*dp_selections(chain, budget), *prefixes, frozenset(order)])[1]


def lower_bound_s(chain: Chain, budget: int) -> float:
    """No schedule that saves everything and fits ``budget`` is faster (seconds); infinite if none fits.

    The forward's relaxation and the backward's are solved apart and added. Bytes moved are rounded up to a grid, and of
    two labels in one cell the earlier clock and the earlier link are taken: both can only lower the value.
    """
    room = chain.sub_budget(budget)
    return _one_way(chain, room, forward=True) + _one_way(chain, room, forward=False)


Point = tuple[float, float]


def _one_way(chain: Chain, room: int, forward: bool) -> float:
    """Least fluid seconds of one direction. States: (bytes moved, of those still held) -> (clock, link) points."""
    total = sum(chain.abar)
    grid = 1 if chain.num_blocks <= 12 else max(1, total // GRID)
    states: dict[tuple[int, int], list[Point]] = {(0, 0): [(0.0, 0.0)]}
    stored = 0
    for block in range(chain.num_blocks):
        stretch, following = save_stretch(chain, block, 0), defaultdict[tuple[int, int], list[Point]](list)
        seconds, peak = (stretch.forward_s, stretch.forward) if forward else (stretch.backward_s, stretch.backward)
        need = max(0, stored + peak - room)
        turn = max(0, stored + max(stretch.forward, stretch.backward) - room)
        is_last = block + 1 == chain.num_blocks
        for (moved, held), points in states.items():
            if moved - held < (turn if is_last else need):
                continue
            for clock, link in points:
                amount = moved if forward else moved - held
                now = max(clock, link - (amount - need) / chain.beta) + seconds
                now = max(now, link - (amount - turn) / chain.beta) if is_last else now
                link = max(link, now) + held / chain.beta if held and not forward else link
                following[moved, 0].append((now, link))
                if not is_last and chain.beta < math.inf:
                    size = -(-stretch.size // grid) * grid
                    # a backward's value starts on the link one stretch later
                    then = max(link, now) + stretch.size / chain.beta if forward else link
                    following[moved + size, size].append((now, then))
        stored += stretch.size
        states = {key: _pareto(points) for key, points in following.items()}
    return min((point[0] for points in states.values() for point in points), default=math.inf)


def _pareto(points: list[Point], limit: int = 64) -> list[Point]:
    """Undominated (clock, link) points; beyond ``limit``, neighbours are merged into their common lower corner."""
    front: list[Point] = []
    for clock, link in sorted(points):
        if not front or link < front[-1][1]:
            front.append((clock, link))
    if len(front) <= limit:
        return front
    step = len(front) / limit
    parts = [front[int(k * step) : int((k + 1) * step)] for k in range(limit)]
    return [(part[0][0], part[-1][1]) for part in parts if part]
