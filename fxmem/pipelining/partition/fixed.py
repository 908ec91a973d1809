"""Cuts for a schedule that is given: equal time, or equal time and weights, improved by shifting cuts."""

from __future__ import annotations

import numpy as np

from fxmem.pipelining.evaluate import Candidate, Cuts, FixedSchedule, ScheduleMaker
from fxmem.pipelining.partition.base import Clock, Problem, finish, infeasible
from fxmem.pipelining.partition.proposals import balanced, least_memory
from fxmem.pipelining.partition.search import improve
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.schedules import Schedule

_MOST_TRIES = 200


def plan_fixed(problem: Problem, schedule: Schedule, cuts: Cuts = ()) -> PipelinePlan:
    """The best cuts found for `schedule`, or the best recomputation under `cuts`. Raises BudgetInfeasible."""
    clock, evaluator, maker = Clock(), problem.evaluator(), FixedSchedule(schedule)
    columns, count = problem.chain.columns, schedule.num_stages
    starts: list[Cuts] = [cuts] if cuts else [balanced(columns["total_s"], count)]
    if not cuts:
        share = columns["total_s"] / columns["total_s"].sum()
        weight = columns["static_bytes"] / max(float(columns["static_bytes"].sum()), 1.0)
        starts.append(balanced(np.asarray(share + weight), count))
        starts.append(least_memory(problem.table(evaluator), schedule.in_flight_of_stage))

    def same(_: tuple[int, ...]) -> ScheduleMaker:
        return maker

    best: Candidate | None = None
    for start in starts:
        found = evaluator.evaluate(start, maker, rounds=4) if start else None
        if found is not None and not cuts:
            found, _ = improve(evaluator, found, (start, ()), same, max_tries=_MOST_TRIES, most_in_flight=0)
        if found is not None and (best is None or found.step_s < best.step_s):
            best = found
    if best is None:
        raise infeasible(problem, evaluator, next(start for start in reversed(starts) if start), maker)
    return finish("fixed", problem, evaluator, best, clock, interleaved=count > schedule.num_devices)
