"""A plan for the fastest tier, spread over all of them: what lies there longest goes to a slower one.

The order of actions stays, and with it the device's memory at every step; only the seconds and what each tier holds
change, which the simulator tells.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

from fxmem.planners.problem import Problem
from fxmem.planners.registry import Options, by_speed
from fxmem.schedule import Machine, SimResult, simulate
from fxmem.schedule.actions import Action, Compute, Offload, Recompute, Reload, Tier
from fxmem.schedule.simulate import Link

_MAX_TRIES = 48  # storages moved for their time alone, each one simulation


def together(options: Options) -> Link:
    """A link no slower than all those tiers side by side: bounds for it hold for every use of them."""
    links = [options.machine.links[tier] for tier in by_speed(options)]
    if len(links) == 1:
        return links[0]
    return Link(sum(link.out_bytes_per_s for link in links), sum(link.in_bytes_per_s for link in links))


def fits(result: SimResult, machine: Machine) -> bool:
    """Whether no tier holds more than it can."""
    return all(_over_bytes(result, machine, tier) <= 0 for tier in result.tier_peak_bytes)


def spread(problem: Problem, actions: Sequence[Action], options: Options) -> tuple[Action, ...] | None:
    """`actions` with each copy on a tier of `options`, within their capacities and in the least time found; None if
    together they hold too little."""
    machine, tiers, order = options.machine, by_speed(options), _longest_idle(problem, actions)
    tier_of = dict.fromkeys(order, tiers[0])

    def play(moved: Mapping[int, Tier]) -> SimResult:
        return simulate(problem.program, _placed(actions, {**tier_of, **moved}), machine)

    def is_enough(number: int) -> bool:
        return _over_bytes(play(dict.fromkeys(here[:number], slower)), machine, tier) <= 0

    for tier, slower in pairwise(tiers):
        here = [storage for storage in order if tier_of[storage] == tier]
        number = bisect_left(range(len(here)), True, key=is_enough)
        tier_of |= dict.fromkeys(here[:number], slower)
    best = play({})
    if not fits(best, machine):
        return None
    moves = [(storage, tier) for storage, tier in product(order, tiers) if tier_of[storage] != tier]
    for storage, tier in moves[:_MAX_TRIES]:
        result = play({storage: tier})
        if result.seconds < best.seconds and fits(result, machine):
            tier_of[storage], best = tier, result
    return _placed(actions, tier_of)


def _over_bytes(result: SimResult, machine: Machine, tier: Tier) -> int:
    held = result.tier_peak_bytes.get(tier, 0)
    return held - machine.capacity_bytes.get(tier, held)


def _placed(actions: Sequence[Action], tier_of: Mapping[int, Tier]) -> tuple[Action, ...]:
    return tuple(replace(a, tier=tier_of[a.storage]) if isinstance(a, Offload) else a for a in actions)


def _longest_idle(problem: Problem, actions: Sequence[Action]) -> list[int]:
    """Offloaded storages, first those with the most compute between their offload and the next reload."""
    now, left_at, idle_s = 0.0, dict[int, float](), dict[int, float]()
    for action in actions:
        match action:
            case Compute(op) | Recompute(op):
                now += problem.program.ops[op].seconds
            case Offload(storage):
                left_at[storage] = now
            case Reload(storage):
                idle_s.setdefault(storage, now - left_at[storage])
            case _:
                pass
    return sorted(left_at, key=lambda storage: (-idle_s.get(storage, float("inf")), storage))
