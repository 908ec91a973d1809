"""The joint planner: cuts, recomputation per stage, in-flight counts, schedule and number of microbatches together.

Dynamic programs and the classic partitioners propose; the simulator accepts; local search and polishing refine. See
docs/0004-pipeline.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.pipelining.bound import lower_bound_s
from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, FixedSchedule, OneFOneBN, ZeroBubble
from fxmem.pipelining.partition.base import Clock, Problem, finish
from fxmem.pipelining.partition.fixed import search_cuts, starts_for
from fxmem.pipelining.partition.layers import cuts_by
from fxmem.pipelining.partition.mcap import mcap_cuts
from fxmem.pipelining.partition.polish import polish
from fxmem.pipelining.partition.proposals import (
    ALPHAS,
    Proposal,
    Times,
    in_flight_of,
    least_memory,
    min_max,
    periodic,
    total_time,
)
from fxmem.pipelining.partition.search import State, improve
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.schedules import torch_schedule

TWO_STAGES = ("interleaved", "interleaved-zb", "zbv", "dualpipev")
"""torch's schedules that give every device two stages."""
_LONG = 100
SCHEDULES = ("1f1b-n", "zero-bubble", *TWO_STAGES)


class Found(NamedTuple):
    candidate: Candidate
    state: State


@dataclass(frozen=True)
class Effort:
    """How hard to search: starts of the local search and neighbours tried from each."""

    num_starts: int = 4
    max_tries: int = 3000
    zero_bubble_tries: int = 150
    two_stage_tries: int = 400


def plan_auto(
    problem: Problem,
    *,
    schedules: Sequence[str] = SCHEDULES,
    microbatch_choices: Sequence[int] = (),
    effort: Effort | None = None,
) -> PipelinePlan:
    """The fastest plan found over `schedules` and over `microbatch_choices` (the batch kept, microbatches rescaled).

    Raises BudgetInfeasible if no schedule fits at any number of microbatches.
    """
    unknown = set(schedules) - set(SCHEDULES)
    if unknown or not schedules:
        raise OptionError(f"unknown schedules {sorted(unknown)}: expected some of {', '.join(SCHEDULES)}")
    base = replace(problem.chain, num_microbatches=problem.num_microbatches)
    plans, failure = [], None
    for count in microbatch_choices or (problem.num_microbatches,):
        chain = problem.chain if count == problem.num_microbatches else base.scaled_to(count)
        try:
            plans.append(_plan(replace(problem, chain=chain, num_microbatches=count), schedules, effort or Effort()))
        except BudgetInfeasible as error:
            failure = error if failure is None or error.min_bytes < failure.min_bytes else failure
    if not plans:
        assert failure is not None
        raise failure
    return min(plans, key=lambda plan: plan.step_s)


def _plan(problem: Problem, schedules: Sequence[str], effort: Effort) -> PipelinePlan:
    clock, evaluator = Clock(), problem.evaluator()
    joint = _one_f_one_b(problem, evaluator, effort)
    found = [joint.candidate] if joint and "1f1b-n" in schedules else []
    best = joint.candidate.step_s if found and joint else float("inf")
    if "zero-bubble" in schedules:
        found += _zero_bubble(problem, evaluator, joint, effort, best)
    for name in (name for name in TWO_STAGES if name in schedules):
        found += _two_stages(problem, evaluator, name, effort, min([best, *(c.step_s for c in found)]))
    candidate = min(found, key=lambda c: c.step_s, default=None)
    plan = finish("auto", problem, evaluator, candidate, clock)
    return replace(plan, bound_s=min(_bounds(problem, schedules)), solve_s=clock())


def _bounds(problem: Problem, schedules: Sequence[str]) -> Iterator[float]:
    """Bounds of the classes searched: the gap covers every one of them."""
    for split, two in {(name == "zero-bubble", name in TWO_STAGES) for name in schedules}:
        yield lower_bound_s(
            problem.chain, problem.cluster, problem.num_microbatches, recompute=problem.recompute,
            split=split, interleaved=two,
        )  # fmt: skip


def _one_f_one_b(problem: Problem, evaluator: Evaluator, effort: Effort) -> Found | None:
    """The best 1F1B-n candidate: proposals, local search from the best few, polish."""
    starts = _simulated(problem, evaluator, _proposals(problem, evaluator)) or _simulated(
        problem, evaluator, _lean_proposals(problem, evaluator)
    )
    best: Found | None = None
    seen: set[State] = set()
    for start in starts[: effort.num_starts]:
        candidate, state = improve(
            evaluator, start.candidate, start.state, lambda counts: OneFOneBN(counts, problem.num_microbatches),
            max_tries=effort.max_tries, most_in_flight=problem.num_microbatches, seen=seen,
        )  # fmt: skip
        if best is None or candidate.step_s < best.candidate.step_s:
            best = Found(candidate, state)
    return best and Found(polish(evaluator, best.candidate), best.state)


def _simulated(problem: Problem, evaluator: Evaluator, proposals: Iterator[Proposal]) -> list[Found]:
    """The proposals that fit, fastest first."""
    found = {}
    for proposal in proposals:
        if proposal.cuts and (proposal.cuts, proposal.in_flight) not in found:
            maker = OneFOneBN(proposal.in_flight, problem.num_microbatches)
            candidate = evaluator.evaluate(proposal.cuts, maker)
            if candidate:
                found[proposal.cuts, proposal.in_flight] = candidate
    ranked = sorted(found.items(), key=lambda item: item[1].step_s)
    return [Found(candidate, state) for state, candidate in ranked]


def _proposals(problem: Problem, evaluator: Evaluator) -> Iterator[Proposal]:
    num, count = problem.cluster.num_devices, problem.num_microbatches
    table, times = problem.table(evaluator), Times(problem.chain, problem.cluster, count)
    vectors = list(dict.fromkeys(in_flight_of(alpha, num, count) for alpha in ALPHAS))
    for cuts in {cuts_by(problem, name) for name in ("layers", "parameters", "time")} | {mcap_cuts(problem)}:
        yield from (Proposal(cuts, vector) for vector in vectors)
    for buffered in (False, True):
        for vector in vectors:
            yield from total_time(times, table, vector, buffered)
        if buffered or len(problem.chain) <= _LONG:  # the dearest program of all on long chains
            for standard in (False, True):
                yield from periodic(times, table, buffered, standard)


def _lean_proposals(problem: Problem, evaluator: Evaluator) -> Iterator[Proposal]:
    """For budgets where nothing else fits: fewer in flight, and the cuts of least memory."""
    num, count = problem.cluster.num_devices, problem.num_microbatches
    table, times = problem.table(evaluator), Times(problem.chain, problem.cluster, count)
    for cap in range(num, 0, -1):
        vector = tuple(min(n, cap) for n in in_flight_of(1.0, num, count))
        for buffered in (False, True):
            yield Proposal(least_memory(table, vector, buffered), vector)
            yield from total_time(times, table, vector, buffered)


def fits(problem: Problem, *, standard: bool = False) -> Candidate | None:
    """A plan that fits, whatever its step time: the least-memory cuts under 1F1B's counts, else (not `standard`)
    fewer.
    """
    evaluator, num = problem.evaluator(), problem.cluster.num_devices
    table = problem.table(evaluator)
    vector = in_flight_of(1.0, num, problem.num_microbatches)
    for cap in (num,) if standard else range(num, 0, -1):
        counts = tuple(min(n, cap) for n in vector)
        for buffered in (True, False):
            cuts = least_memory(table, counts, buffered)
            found = cuts and evaluator.evaluate(cuts, OneFOneBN(counts, problem.num_microbatches))
            if found:
                return found
    return None


def _zero_bubble(
    problem: Problem, evaluator: Evaluator, joint: Found | None, effort: Effort, cutoff_s: float
) -> list[Candidate]:
    """Split backwards: from several cuts, limits searched around usual in-flight counts."""
    num, count = problem.cluster.num_devices, problem.num_microbatches
    cuts = dict.fromkeys([*([joint.state[0]] if joint else []), cuts_by(problem, "time"), _forward_lead_cuts(problem)])
    vectors = [in_flight_of(alpha, num, count) for alpha in (1.0, 1.34, 1.67, 2.0)] + (
        [joint.state[1]] if joint else []
    )
    found: list[Candidate] = []
    for cut in cuts:
        best: Found | None = None
        for vector in dict.fromkeys(vectors):
            limit = best.candidate.step_s if best else float("inf")
            candidate = evaluator.evaluate(cut, ZeroBubble(vector, count), limit, rounds=4)
            best = Found(candidate, (cut, vector)) if candidate else best
        if best and best.candidate.step_s <= 1.1 * cutoff_s:
            candidate, _ = improve(
                evaluator, best.candidate, best.state, lambda limits: ZeroBubble(limits, count),
                max_tries=effort.zero_bubble_tries, most_in_flight=count,
            )  # fmt: skip
            cutoff_s = min(cutoff_s, candidate.step_s)
            found.append(candidate)
        elif best:
            found.append(best.candidate)
    return found


def _forward_lead_cuts(problem: Problem) -> Cuts:
    """Cuts that minimise the largest (forwards of earlier stages + m times the stage's work), exactly."""
    columns = problem.chain.columns
    lead = np.concatenate([[0.0], np.cumsum(columns["forward_s"])])[:-1, None]
    work = np.concatenate([[0.0], np.cumsum(columns["total_s"])])
    return min_max(lead + problem.num_microbatches * (work[None, :] - work[:-1, None]), problem.cluster.num_devices)


def _two_stages(problem: Problem, evaluator: Evaluator, name: str, effort: Effort, cutoff_s: float) -> list[Candidate]:
    """Two stages per device in torch's order of that name; nothing where torch or the chain can't."""
    num = problem.cluster.num_devices
    if num < 2 or len(problem.chain) < 2 * num:
        return []
    try:
        schedule = torch_schedule(name, num, problem.num_microbatches, 2)
    except OptionError:
        return []
    starts = starts_for(problem, evaluator, schedule)
    found = search_cuts(evaluator, FixedSchedule(schedule), starts, effort.two_stage_tries, cutoff_s)
    return [found] if found else []
