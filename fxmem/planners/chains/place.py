"""Where a schedule's copies go: given what is computed and what may be offloaded, the one program under the budget.

Bytes are given up as late as possible (right before the first action that would not fit, oldest copy first) and taken
back as early as fits before their next use, never before an earlier reload. What never had to be given up is not moved.
The simulator judges the result; nothing here is trusted for peak or time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.simulate import (
    Action,
    Backward,
    ChainRun,
    ComputeAction,
    Free,
    Item,
    Offload,
    Reload,
    Wait,
    simulate,
)


@dataclass(slots=True)
class _Trip:
    """One value's absence: between its use ``left`` and its use ``needed`` (indices of compute actions)."""

    item: Item
    size: int
    born: int
    left: int
    needed: int
    freed: int = -1
    reloaded: int = -1


def _durations(chain: Chain, compute: Sequence[ComputeAction]) -> list[float]:
    """Start time of every compute action when nothing stalls; one more entry for the end."""
    starts, chosen = [0.0], dict[int, int]()
    for action in compute:
        if isinstance(action, Backward):
            starts.append(starts[-1] + chain.options(action.block)[chosen[action.block]].v)
        else:
            starts.append(starts[-1] + chain.u[action.block])
            chosen[action.block] = action.option
    return starts


def _trips(
    starts: Sequence[float], uses: dict[Item, list[int]], sizes: dict[Item, int], offload: Collection[Item]
) -> list[_Trip]:
    """For each offloaded value its longest absence, in the order in which the values are made."""
    trips = []
    for item, touched in uses.items():
        if item not in offload or sizes[item] == 0:
            continue
        left, needed = max(pairwise(touched), key=lambda gap: starts[gap[1]] - starts[gap[0] + 1])
        if needed > left + 1:
            trips.append(_Trip(item, sizes[item], touched[0], left, needed))
    return sorted(trips, key=lambda trip: trip.born)


def _give_up(during: list[int], trips: list[_Trip], budget: int) -> bool:
    """Choose where each value is given up, lowering ``during`` while it is away. False if the budget can't be held."""
    for now in range(len(during)):
        for trip in trips:
            if during[now] <= budget:
                break
            if trip.freed < 0 and trip.left < now < trip.needed:
                trip.freed = now
                for p in range(now, trip.needed):
                    during[p] -= trip.size
        if during[now] > budget:
            return False
    return True


def _bring_back(during: list[int], trips: list[_Trip], budget: int) -> None:
    """Choose where each value is taken back: as early as fits, in the order of first use."""
    earliest = 0
    for trip in sorted((t for t in trips if t.freed >= 0), key=lambda t: t.needed):
        point = trip.needed
        while point - 1 > trip.freed and point - 1 >= earliest and during[point - 1] + trip.size <= budget:
            point -= 1
            during[point] += trip.size
        trip.reloaded = earliest = point


def _program(compute: Sequence[ComputeAction], trips: list[_Trip]) -> list[Action]:
    before: list[list[Action]] = [[] for _ in compute]
    after: list[list[Action]] = [[] for _ in compute]
    moved = [trip for trip in trips if trip.freed >= 0]
    for trip in moved:
        after[trip.born].append(Offload(trip.item))
        before[trip.freed].append(Free(trip.item))
    for trip in sorted(moved, key=lambda t: t.needed):
        before[trip.reloaded].append(Reload(trip.item))
    for trip in moved:
        before[trip.needed].append(Wait(trip.item))
    return [step for p, action in enumerate(compute) for step in (*before[p], action, *after[p])]


def place(
    chain: Chain,
    compute: Sequence[ComputeAction],
    offload: Collection[Item],
    budget: int,
    plain: ChainRun | None = None,
) -> list[Action] | None:
    """The program that runs ``compute`` under ``budget`` bytes moving only values of ``offload``; None if none does.

    ``plain``: the simulator's run of ``compute``, where it is known (see ``played``).
    """
    plain = simulate(chain, compute) if plain is None else plain
    during = list(plain.during)
    trips = _trips(_durations(chain, compute), plain.uses, plain.sizes, offload)
    if not _give_up(during, trips, budget):
        return None
    _bring_back(during, trips, budget)
    return _program(compute, trips)


def place_at_once(chain: Chain, compute: Sequence[ComputeAction], offload: Collection[Item]) -> list[Action]:
    """The program that waits for every copy: given up right after its last use, taken back right before the next."""
    plain = simulate(chain, compute)
    trips = _trips(_durations(chain, compute), plain.uses, plain.sizes, offload)
    for trip in trips:
        trip.freed, trip.reloaded = trip.left + 1, trip.needed
    return _program(compute, trips)
