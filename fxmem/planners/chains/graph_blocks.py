"""A `Problem` seen as a chain of blocks: cuts of forward where few bytes cross, the matching cuts of backward, costs.

Values that cross more than one block (masks, rotary tables, skips), results, and whatever can't be computed twice are
*pinned*: kept once made, charged throughout. Everything else belongs to one boundary or to one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fxmem.planners.chains.model import BlockOption, Chain
from fxmem.planners.problem import Problem

Levels = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]

MOST_CARRIED = 2  # boundaries that a value may cross and still be part of each; beyond it is pinned
LEAN_SHARES = (0.25, 0.5, 0.75, 1.0)  # of the bytes of a block's saved set, left out by its further options


@dataclass(frozen=True)
class Blocks:
    """Block i runs forward kernels ``forward[i]`` and, in the chain's backward, kernels ``backward[i]``.

    ``boundary[j]``: storages made before block j that it or a later one reads, pinned ones left out. ``saved[i][k]``:
    storages that option k of block i saves, ``boundary[i + 1]`` among them; option 0 saves all that backward reads, the
    others leave out what is cheapest to make again. ``pinned``: storages that are never dropped. ``fixed``: kernels
    that may run only once.
    """

    problem: Problem
    forward: tuple[range, ...]
    backward: tuple[range, ...]
    boundary: tuple[frozenset[int], ...]
    saved: tuple[tuple[frozenset[int], ...], ...]
    pinned: frozenset[int]
    fixed: npt.NDArray[np.bool_]
    chain: Chain


def crossing_bytes(problem: Problem) -> npt.NDArray[np.int64]:
    """Bytes made up to each forward kernel that later forward kernels read."""
    change = np.zeros(problem.num_forward + 1, dtype=np.int64)
    last = _last_forward_read(problem)
    for storage in np.flatnonzero((problem.producer >= 0) & (last > problem.producer)):
        change[problem.producer[storage]] += problem.nbytes[storage]
        change[last[storage]] -= problem.nbytes[storage]
    return np.cumsum(change)[: problem.num_forward]


def _last_forward_read(problem: Problem) -> npt.NDArray[np.int64]:
    last = np.full(problem.num_storages, -1, dtype=np.int64)
    for kernel in range(problem.num_forward):
        last[problem.reads(kernel)] = kernel
    return last


def choose_cuts(problem: Problem, most_blocks: int) -> list[int]:
    """Forward kernels after which to cut: the narrowest places first, none too near another (in bytes made)."""
    crossing, made = crossing_bytes(problem), np.zeros(problem.num_forward, dtype=np.int64)
    for kernel in range(problem.num_forward):
        made[kernel] = problem.nbytes[problem.writes(kernel)].sum()
    level = np.cumsum(made)
    near = level[-1] / (2 * most_blocks) if len(level) else 0
    inner = range(1, problem.num_forward - 1)
    places = [k for k in inner if crossing[k - 1] >= crossing[k] <= crossing[k + 1] and crossing[k] > 0]
    chosen: list[int] = []
    for place in sorted(places, key=lambda k: int(crossing[k])):
        if len(chosen) + 1 < most_blocks and all(abs(level[place] - level[other]) >= near for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def split(problem: Problem, cuts: Sequence[int]) -> Blocks:
    """The blocks between the cuts."""
    edges = [0, *(cut + 1 for cut in cuts), problem.num_forward]
    forward = tuple(range(low, high) for low, high in pairwise(edges))
    block_of = np.repeat(np.arange(len(forward)), [len(part) for part in forward])
    fixed = _fixed_kernels(problem)
    made_in = np.where(_made_forward(problem), block_of[np.clip(problem.producer, 0, problem.num_forward - 1)], -1)
    last = _last_forward_read(problem)
    reach = np.where(last >= 0, block_of[np.maximum(last, 0)], -1)
    pinned = _made_forward(problem) & (
        problem.keep_to_end | (reach > made_in + MOST_CARRIED) | fixed[np.maximum(problem.producer, 0)]
    )
    backward_reads = set(_read_by(problem, range(problem.num_forward, problem.num_kernels)))
    loose = [int(s) for s in np.flatnonzero(_made_forward(problem) & ~pinned)]
    boundary = [set[int]() for _ in range(len(forward) + 1)]
    saved = [set[int]() for _ in forward]
    for storage in loose:
        for cut in range(made_in[storage] + 1, reach[storage] + 1):
            boundary[cut].add(storage)
            saved[cut - 1].add(storage)
        if storage in backward_reads:
            saved[made_in[storage]].add(storage)
    backward = _split_backward(problem, made_in, {s for s in loose if s in backward_reads}, len(forward))
    frozen = tuple(map(frozenset, boundary)), tuple(map(frozenset, saved)), frozenset(map(int, np.flatnonzero(pinned)))
    chain = _chain(problem, forward, backward, *frozen)
    sets = [_leaner(problem, forward[i], frozen[1][i], frozen[0][i + 1]) for i in range(len(forward))]
    more = tuple(tuple(_option(problem, chain, i, kept, again) for kept, again in part) for i, part in enumerate(sets))
    options = tuple((frozen[1][i], *(kept for kept, _ in part)) for i, part in enumerate(sets))
    return Blocks(problem, forward, backward, frozen[0], options, frozen[2], fixed, replace(chain, more=more))


def _leaner(
    problem: Problem, kernels: range, saved: frozenset[int], crossing: frozenset[int]
) -> list[tuple[frozenset[int], list[int]]]:
    """Smaller saved sets of a block, each with the kernels that must then run again: the cheapest per byte go first."""
    inner = [s for s in saved - crossing if problem.nbytes[s] and problem.producer[s] in kernels]
    inner.sort(key=lambda s: (float(problem.seconds[problem.producer[s]]) / int(problem.nbytes[s]), s))
    level = np.cumsum(problem.nbytes[inner])
    found: dict[frozenset[int], list[int]] = {}
    for share in LEAN_SHARES if inner else ():
        dropped = set(inner[: int(np.searchsorted(level, share * level[-1])) + 1])
        kept, again, need = saved - dropped, [], set(dropped)
        for kernel in reversed(kernels):
            made = set(map(int, problem.writes(kernel)))
            if made & need:
                again.append(kernel)
                need |= set(map(int, problem.reads(kernel))) - kept
        found[kept] = again
    return list(found.items())


def _option(problem: Problem, chain: Chain, block: int, kept: frozenset[int], again: Sequence[int]) -> BlockOption:
    """What saving only ``kept`` costs: ``again`` runs in backward, the largest of its results beside it."""
    largest = max((int(problem.nbytes[problem.writes(k)].sum()) for k in again), default=0)
    return BlockOption(
        chain.u[block],
        chain.v[block] + float(problem.seconds[list(again)].sum()),
        int(problem.nbytes[list(kept)].sum()),
        chain.wf[block],
        chain.wb[block] + largest,
    )


def _made_forward(problem: Problem) -> npt.NDArray[np.bool_]:
    return (problem.producer >= 0) & (problem.producer < problem.num_forward)


def _read_by(problem: Problem, kernels: Iterable[int]) -> Iterable[int]:
    for kernel in kernels:
        yield from map(int, problem.reads(kernel))


def _fixed_kernels(problem: Problem) -> npt.NDArray[np.bool_]:
    """Kernels that may run only once: not recomputable, or making a storage that another op writes in place."""
    fixed = ~problem.recomputable
    for op in problem.program.ops:
        for storage in op.mutates:
            if problem.producer[storage] >= 0:
                fixed[problem.producer[storage]] = True
    return fixed


def _split_backward(
    problem: Problem, made_in: npt.NDArray[np.int64], loose: set[int], num_blocks: int
) -> tuple[range, ...]:
    """Backward in captured order, cut where the last reader of anything that later blocks made has run."""
    stop = [problem.num_forward] * (num_blocks + 1)
    for kernel in range(problem.num_forward, problem.num_kernels):
        blocks = [int(made_in[s]) for s in map(int, problem.reads(kernel)) if s in loose]
        if blocks:
            stop[max(blocks)] = kernel + 1
    for block in reversed(range(num_blocks)):
        stop[block] = max(stop[block], stop[block + 1])
    stop[0] = problem.num_kernels
    return tuple(range(stop[block + 1], stop[block]) for block in range(num_blocks))


def _chain(
    problem: Problem,
    forward: Sequence[range],
    backward: Sequence[range],
    boundary: Sequence[frozenset[int]],
    saved: Sequence[frozenset[int]],
    pinned: frozenset[int],
) -> Chain:
    """Seconds and bytes per block. ``g`` counts, with the gradients that cross, the results that backward has left."""
    size, length = problem.nbytes, len(forward)

    def weigh(storages: Iterable[int]) -> int:
        return int(sum(int(size[s]) for s in storages))

    a, abar = [weigh(part) for part in boundary], [weigh(part) for part in saved]
    wf = [max(0, _peak(problem, forward[i], boundary[i + 1], pinned) - a[i + 1]) for i in range(length)]
    wf_all = [max(0, _peak(problem, forward[i], saved[i], pinned) - abar[i]) for i in range(length)]
    g = [0] * (length + 1)
    wb = [0] * length
    levels = backward_levels(problem)
    for i in reversed(range(length)):
        g[i], peak = _backward_bytes(problem, backward[i], levels)
        wb[i] = peak - g[i] - g[i + 1]
    seconds = [float(problem.seconds[part.start : part.stop].sum()) for part in (*forward, *backward)]
    return Chain(
        tuple(seconds[:length]), tuple(seconds[length:]), tuple(a), tuple(abar),
        tuple(map(max, wf, wf_all)), tuple(wb), tuple(g), base=problem.base_bytes + weigh(pinned),
    )  # fmt: skip


def _peak(problem: Problem, kernels: range, kept: frozenset[int], pinned: frozenset[int]) -> int:
    """Peak bytes of what some forward kernels make, ``kept`` staying to the end."""
    last = {s: k for k in kernels for s in map(int, problem.reads(k))}
    alive, peak = 0, 0
    dying: dict[int, int] = {}
    for kernel in kernels:
        made = [s for s in map(int, problem.writes(kernel)) if s not in pinned]
        alive += sum(int(problem.nbytes[s]) for s in made)
        peak = max(peak, alive + int(problem.workspace_bytes[kernel]))
        for storage in made:
            if storage not in kept:
                end = max(last.get(storage, kernel), kernel)
                dying[end] = dying.get(end, 0) + int(problem.nbytes[storage])
        alive -= dying.get(kernel, 0)
    return peak


def _backward_bytes(problem: Problem, kernels: range, level: Levels) -> tuple[int, int]:
    """Bytes made by backward that stand after the last of ``kernels``, and the most that stand during them."""
    if not len(kernels):
        before = kernels.start - problem.num_forward - 1
        standing = int(level[0][before]) if before >= 0 else 0
        return standing, standing
    low, high = kernels.start - problem.num_forward, kernels.stop - problem.num_forward
    return int(level[0][high - 1]), int(level[1][low:high].max())


def backward_levels(problem: Problem) -> Levels:
    """Bytes of backward's own values after and during each backward kernel."""
    count = problem.num_kernels - problem.num_forward
    change, last = np.zeros(count + 1, dtype=np.int64), np.arange(problem.num_storages) * 0 - 1
    for k in range(count):
        last[problem.reads(k + problem.num_forward)] = k
    last[problem.keep_to_end] = count
    freed = np.zeros(count + 1, dtype=np.int64)
    for storage in np.flatnonzero(problem.producer >= problem.num_forward):
        born = int(problem.producer[storage]) - problem.num_forward
        change[born] += problem.nbytes[storage]
        freed[max(int(last[storage]), born)] += problem.nbytes[storage]
    standing = np.cumsum(change - freed)[:count]
    during = standing + freed[:count] + problem.workspace_bytes[problem.num_forward :]
    return standing, during
