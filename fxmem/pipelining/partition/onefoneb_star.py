"""1F1B*: the least in-flight counts of a periodic schedule with contiguous stages (Beaumont, Eyraud-Dubois, Shilova
2020).

For a period T the stages, links between them included, are walked from last to first and packed into groups of at
most T seconds; a stage of group g keeps g microbatches, and no periodic schedule of that period keeps fewer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fxmem.pipelining.evaluate import Cuts, OneFOneBN, ScheduleMaker
from fxmem.pipelining.partition.base import Clock, Problem, best_of, finish
from fxmem.pipelining.partition.proposals import Times, periodic
from fxmem.pipelining.plan import PipelinePlan


def groups(stage_s: Sequence[float], link_s: Sequence[float], period_s: float) -> tuple[int, ...]:
    """In-flight count of each stage; `link_s[s]` is the round trip between stages s and s + 1. () if one exceeds T."""
    if max([*stage_s, *link_s]) > period_s:
        return ()
    counts, group, load = [0] * len(stage_s), 1, 0.0
    for stage in range(len(stage_s) - 1, -1, -1):
        for seconds in ([link_s[stage]] if stage < len(stage_s) - 1 else []) + [stage_s[stage]]:
            if load + seconds > period_s * (1 + 1e-12):
                group, load = group + 1, 0.0
            load += seconds
        counts[stage] = group
    return tuple(counts)


def star_proposals(problem: Problem) -> Iterator[tuple[Cuts, OneFOneBN]]:
    """Contiguous cuts for a ladder of periods above the least feasible one, each with its groups as in-flight
    counts.
    """
    evaluator = problem.evaluator()
    times = Times(problem.chain, problem.cluster, problem.num_microbatches)
    for buffered in (False, True):
        for cuts, counts in periodic(times, problem.table(evaluator), buffered, standard=False):
            yield cuts, OneFOneBN(counts, problem.num_microbatches)


def plan_onefoneb_star(problem: Problem) -> PipelinePlan:
    """Cuts by dynamic program over the delay, groups as in-flight counts, the fastest that fits in simulation."""
    clock, evaluator = Clock(), problem.evaluator()
    tries: Iterator[tuple[Cuts, ScheduleMaker]] = iter(star_proposals(problem))
    return finish("1f1b-star", problem, evaluator, best_of(evaluator, tries), clock)
