"""Cuts for a schedule that is given: equal time, or equal time and weights, improved by shifting cuts."""

from __future__ import annotations

import itertools

import numpy as np

from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, FixedSchedule, ScheduleMaker
from fxmem.pipelining.partition.base import Clock, Problem, finish, infeasible
from fxmem.pipelining.partition.proposals import balanced, least_squares, min_max
from fxmem.pipelining.partition.search import improve, moved_cuts
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.schedules import Schedule

_MOST_TRIES = 400
_MOST_LEAN_TRIES = 24_000
"""Times blocks."""
_SLOWER = (1.0 + 1e-9, 1.06, 1.15, float("inf"))
"""How much slower than equal time the slowest stage may be, where the cuts of least memory are looked for."""
_ROOM = 0.95
"""Of a device's bytes, what its leanest state may take before cuts are made leaner."""
_WORTH = 1.15
"""A start this much slower than the best known is not improved."""


def plan_fixed(problem: Problem, schedule: Schedule, cuts: Cuts = ()) -> PipelinePlan:
    """The best cuts found for `schedule`, or the best recomputation under `cuts`. Raises BudgetInfeasible."""
    clock, evaluator, maker = Clock(), problem.evaluator(), FixedSchedule(schedule)
    starts = [cuts] if cuts else starts_for(problem, evaluator, schedule)
    best = evaluator.evaluate(cuts, maker, rounds=4) if cuts else search_cuts(evaluator, maker, starts, _MOST_TRIES)
    if best is None:
        raise infeasible(problem, evaluator, starts[-1], maker)
    two = schedule.num_stages > schedule.num_devices
    return finish("fixed", problem, evaluator, best, clock, interleaved=two)


def starts_for(problem: Problem, evaluator: Evaluator, schedule: Schedule) -> list[Cuts]:
    """Cuts by equal time, by time and weights, and by least memory with no stage slower than a little over equal."""
    columns, count = problem.chain.columns, schedule.num_stages
    share = columns["total_s"] / columns["total_s"].sum()
    weight = columns["static_bytes"] / max(float(columns["static_bytes"].sum()), 1.0)
    made = [balanced(columns["total_s"], count), balanced(np.asarray(share + weight), count)]
    table = problem.table(evaluator)
    work = np.concatenate([[0.0], np.cumsum(columns["total_s"])])
    stage_s = work[None, :] - work[:-1, None]
    equal_s = max(float(stage_s[i, j]) for i, j in itertools.pairwise(made[0]))
    needs = [table.least(n) for n in schedule.in_flight_of_stage]
    made.append(least_squares(np.where(stage_s <= _SLOWER[0] * equal_s, stage_s, np.inf), count))
    for factor in _SLOWER:
        limited = [np.where(stage_s <= factor * equal_s, need, np.inf) for need in needs]
        made += [least_squares(limited, count), min_max(limited, count)]
    return [cuts for cuts in dict.fromkeys(made) if cuts]


def leanest(problem: Problem, schedule: Schedule) -> Cuts:
    """Of the starts, the one whose largest device needs least with everything recomputed."""
    evaluator, maker = problem.evaluator(), FixedSchedule(schedule)

    def need(cuts: Cuts) -> float:
        return max(float(device.need.min()) for device in evaluator.devices(cuts, maker))

    return min(starts_for(problem, evaluator, schedule), key=need)


def search_cuts(
    evaluator: Evaluator, maker: FixedSchedule, starts: list[Cuts], max_tries: int, cutoff_s: float = float("inf")
) -> Candidate | None:
    """The fastest candidate from `starts` improved by shifting cuts; starts that don't fit are first made leaner.

    One that is far slower than `cutoff_s` is not improved.
    """

    def same(_: tuple[int, ...]) -> ScheduleMaker:
        return maker

    tries = (evaluator.evaluate(cuts, maker, rounds=4) for cuts in starts)
    found = [candidate for candidate in tries if candidate]
    if not found:
        tries = (evaluator.evaluate(leaner(evaluator, cuts, maker), maker) for cuts in starts)
        found = [candidate for candidate in tries if candidate]
    best: Candidate | None = None
    for candidate in sorted(found, key=lambda c: c.step_s):
        if candidate.step_s <= _WORTH * min(cutoff_s, best.step_s if best else float("inf")):
            state = candidate.cuts, ()
            candidate, _ = improve(evaluator, candidate, state, same, max_tries=max_tries, most_in_flight=0)
        if best is None or candidate.step_s < best.step_s:
            best = candidate
    return best


def leaner(evaluator: Evaluator, cuts: Cuts, maker: ScheduleMaker) -> Cuts:
    """Cuts shifted until every device, everything recomputed, has a little room, none much slower than the slowest
    was.
    """
    work, room = evaluator.sums["total_s"], _ROOM * evaluator.cluster.memory_bytes

    def slowest_s(of: Cuts) -> float:
        load = [0.0] * evaluator.cluster.num_devices
        for device, (i, j) in zip(maker.device_of, itertools.pairwise(of), strict=True):
            load[device] += work[j] - work[i]
        return max(load)

    def missing(of: Cuts) -> float:
        return sum(max(float(device.need.min()) - room, 0.0) for device in evaluator.devices(of, maker))

    least, most_s, tries, improved = missing(cuts), _SLOWER[1] * slowest_s(cuts), 0, True
    while improved and least > 0:
        improved = False
        for other in moved_cuts(cuts, len(evaluator.chain)):
            if slowest_s(other) > most_s:
                continue
            tries += 1
            if tries * len(evaluator.chain) > _MOST_LEAN_TRIES:
                return cuts
            if (there := missing(other)) < least:
                cuts, least, improved = other, there, True
                break
    return cuts
