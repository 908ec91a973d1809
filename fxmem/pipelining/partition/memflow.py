"""MemFlow: Metropolis search over cuts and recomputation together in a memory-aware simulator (SIGMOD 2020 SRC;
FlexFlow).

The state gives each block its stage (contiguous cuts) and its recompute level: 0 nothing, 1 cheap outputs (the
block's first option), 2 all but the input (its last). A step's cost is the makespan in ms plus a large multiple of
the bytes over the budget; a move is accepted with probability exp(-alpha * increase) against the current state.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, ScheduleMaker
from fxmem.pipelining.partition.base import Clock, Problem, finish
from fxmem.pipelining.partition.layers import cuts_by
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.simulate import StageCost, durations_of, layout_of, run_memory, run_times, step_of

_ALPHA_PER_MS = 1.2
_MS_PER_MIB_OVER = 10.0
_RESET_EVERY = 400


@dataclass(frozen=True)
class _State:
    cuts: Cuts
    levels: tuple[int, ...]
    """Recompute level 0, 1 or 2 of every block."""


class _Search:
    """The simulator with stage costs kept: a move re-prices only the stages it touches."""

    def __init__(self, problem: Problem, evaluator: Evaluator, seed: int) -> None:
        self.problem, self.evaluator, self.random = problem, evaluator, random.Random(seed)
        self.maker: ScheduleMaker = problem.standard
        self.num_levels = 1 if problem.recompute == "none" else 3
        self.kept: dict[tuple[int, int, tuple[int, ...]], StageCost] = {}
        self.schedule = self.maker.build([], problem.cluster)
        self.layout = layout_of(self.schedule)

    def option(self, block: int, level: int) -> int:
        """The block's option at a recompute level."""
        last = len(self.problem.chain.blocks[block].options) - 1
        return {0: 0, 1: min(1, last), 2: last}[level]

    def options(self, state: _State) -> tuple[int, ...]:
        return tuple(self.option(block, level) for block, level in enumerate(state.levels))

    def stage_cost(self, first: int, last: int, state: _State) -> StageCost:
        key = (first, last, state.levels[first:last])
        if key not in self.kept:
            (self.kept[key],) = self.evaluator.costs_of_levels((first, last), self.options(state))
        return self.kept[key]

    def run(self, state: _State) -> tuple[float, float, tuple[float, ...]]:
        """(cost in ms, step in seconds, peak bytes per device)."""
        spans = zip(state.cuts, state.cuts[1:], strict=False)
        costs = [self.stage_cost(i, j, state) for i, j in spans]
        start, end = run_times(self.layout, durations_of(self.schedule, costs, self.problem.cluster))
        peaks = run_memory(self.layout, costs, start, end, self.problem.chain.input_bytes)
        over = sum(max(0.0, peak - self.problem.cluster.memory_bytes) for peak in peaks)
        step = step_of(self.layout, end)
        return step * 1e3 + _MS_PER_MIB_OVER * over / 2**20, step, tuple(peaks)

    def neighbour(self, state: _State) -> _State:
        """Shift one cut, change one block's level, or set a whole stage's levels."""
        draw = self.random.random()
        if draw < 0.3 or self.num_levels == 1:
            return self._shifted(state)
        levels = list(state.levels)
        level = self.random.randrange(self.num_levels)
        if draw < 0.85:
            levels[self.random.randrange(len(levels))] = level
        else:
            stage = self.random.randrange(len(state.cuts) - 1)
            for block in range(state.cuts[stage], state.cuts[stage + 1]):
                levels[block] = level
        return _State(state.cuts, tuple(levels))

    def _shifted(self, state: _State) -> _State:
        if len(state.cuts) < 3:
            return state
        cuts = list(state.cuts)
        position = self.random.randrange(1, len(cuts) - 1)
        cuts[position] += self.random.choice((-1, 1))
        return _State(tuple(cuts), state.levels) if cuts[position - 1] < cuts[position] < cuts[position + 1] else state


def plan_memflow(problem: Problem, *, num_iterations: int = 4000, seed: int = 0) -> PipelinePlan:
    """The best valid state of the walk, which begins with nothing recomputed; if it met none, of a second one that
    begins with everything recomputed. Raises BudgetInfeasible if that met none either.
    """
    clock, evaluator = Clock(), problem.evaluator()
    search = _Search(problem, evaluator, seed)
    levels = {"none": (0,), "full": (2,), "optimal": (0, 2)}[problem.recompute]
    cuts, count = cuts_by(problem, "time"), len(problem.chain)
    walks = (_walk(search, _State(cuts, (level,) * count), num_iterations) for level in levels)
    valid = next((state for state in walks if state is not None), None)
    return finish("memflow", problem, evaluator, _candidate(search, valid), clock)


def _walk(search: _Search, current: _State, num_iterations: int) -> _State | None:
    """The fastest state met that fits, if any."""
    memory_bytes = search.problem.cluster.memory_bytes
    cost, step, peaks = search.run(current)
    best, best_cost = current, cost
    valid: tuple[float, _State] | None = None
    for iteration in range(num_iterations):
        if max(peaks) <= memory_bytes and (valid is None or step < valid[0]):
            valid = step, current
        if iteration % _RESET_EVERY == _RESET_EVERY - 1:
            current, cost = best, best_cost
        state = search.neighbour(current)
        new_cost, new_step, new_peaks = search.run(state)
        if new_cost <= cost or search.random.random() < math.exp(-_ALPHA_PER_MS * (new_cost - cost)):
            current, cost, step, peaks = state, new_cost, new_step, new_peaks
            if cost < best_cost:
                best, best_cost = current, cost
    return valid[1] if valid else None


def _candidate(search: _Search, state: _State | None) -> Candidate | None:
    if state is None:
        return None
    return search.evaluator.simulate_levels(state.cuts, search.maker, search.options(state))
