"""Planners to compare with: keep everything, recompute everything, keep every square-root-th block's input."""

from __future__ import annotations

import math

import numpy as np

from fxmem.planners.kernel.binding import Kernel, State
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.bound import free_lunch_s
from fxmem.planners.recompute.search import infeasible, solution
from fxmem.planners.registry import Options, Solution, register


def _checked(kernel: Kernel, state: State, budget_bytes: int) -> Solution:
    kernel.load(state)
    score = kernel.evaluate(budget_bytes)
    if score.peak_bytes > budget_bytes:
        raise infeasible(kernel, budget_bytes, score.peak_bytes, state)
    return solution(kernel, state, -free_lunch_s(kernel.problem), {})


@register("none")
def none(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Keep everything backward reads. Raises BudgetInfeasible when that does not fit."""
    kernel = Kernel(problem)
    return _checked(kernel, kernel.all_saved(), budget_bytes)


@register("full")
def full(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Keep nothing that can be recomputed: the first backward kernel needs all of forward again, so it rarely helps."""
    kernel = Kernel(problem)
    return _checked(kernel, State(np.zeros(problem.num_storages, dtype=np.uint8)), budget_bytes)


def narrow_cuts(problem: Problem) -> list[tuple[int, int]]:
    """(kernel, bytes crossing to later forward kernels) after each forward kernel, where fewer bytes cross than at both
    neighbours: the boundaries between blocks."""
    nf = problem.num_forward
    change = np.zeros(nf + 1, dtype=np.int64)
    last = np.full(problem.num_storages, -1, dtype=np.int64)
    for k in range(nf):
        last[problem.reads(k)] = k
    for s in np.flatnonzero((problem.producer >= 0) & (last > problem.producer)):
        change[problem.producer[s]] += problem.nbytes[s]
        change[last[s]] -= problem.nbytes[s]
    crossing = np.cumsum(change)[:nf]
    inner = range(1, nf - 1)
    return [(k, int(crossing[k])) for k in inner if crossing[k - 1] > crossing[k] <= crossing[k + 1]]


@register("sqrt")
def sqrt(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Chen et al. 2016 (arXiv:1604.06174): cut forward into about sqrt(n) segments of equal time at its narrowest
    places, keep what crosses the cuts, recompute each segment at once when backward reaches it."""
    kernel = Kernel(problem)
    cuts = [k for k, _ in narrow_cuts(problem)]
    wanted = max(1, math.isqrt(len(cuts)))
    clock = np.cumsum(problem.seconds[: problem.num_forward])
    marks = [clock[-1] * (i + 1) / (wanted + 1) for i in range(wanted)] if len(clock) else []
    chosen = sorted({min(cuts, key=lambda k: abs(clock[k] - mark)) for mark in marks}) if cuts else []
    best: State | None = None
    least = -1
    for keep in range(len(chosen), -1, -1):
        state = _keep_crossing(problem, chosen[:keep])
        kernel.load(state)
        peak = kernel.evaluate(budget_bytes).peak_bytes
        if best is None or peak < least:
            best, least = state, peak
    assert best is not None
    return _checked(kernel, best, budget_bytes)


def _keep_crossing(problem: Problem, cuts: list[int]) -> State:
    """Keep what a later forward kernel reads across a cut; in the last segment keep everything."""
    saved = np.zeros(problem.num_storages, dtype=np.uint8)
    tail = cuts[-1] if cuts else -1
    saved[(problem.producer > tail) & (problem.producer < problem.num_forward)] = 1
    for k in range(problem.num_forward):
        for s in problem.reads(k):
            if any(problem.producer[s] <= cut < k for cut in cuts):
                saved[s] = 1
    return State(saved)
