"""MadPipe: allocations with one special device that may hold several stages (Beaumont, Eyraud-Dubois, Shilova 2022).

A memoised search over the layers from the last to the first takes a target period; its state is the number of ordinary
devices left, the special device's load and memory so far, and the delay V behind the present layer (which fixes the
in-flight count of the next stage). A state fails with any that failed on less of all three, so no grid is needed. The
target is bisected; the allocation is then scheduled by the periodic integer program.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fxmem.pipelining.curves import Recompute
from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, OneFOneBN
from fxmem.pipelining.partition.base import Clock, Problem, finish
from fxmem.pipelining.partition.periodic_ilp import schedule_allocation
from fxmem.pipelining.partition.proposals import balanced, in_flight_of
from fxmem.pipelining.plan import PipelinePlan

_MOST_VISITS = 8_000
"""States expanded for one target; a target not reached by then counts as out of reach."""
_MOST_LAYERS = 26
"""Longer chains are grouped into this many layers of about equal time first."""


class Allocation(NamedTuple):
    cuts: Cuts
    device_of: tuple[int, ...]


class _Facts:
    """Seconds and bytes of stages [k, l) over grouped layers, for one way of recomputing."""

    def __init__(self, problem: Problem, recompute: Recompute) -> None:
        evaluator = Evaluator(problem.chain, problem.cluster, recompute)
        self.table, length = evaluator.curves, len(problem.chain)
        work = problem.chain.columns["total_s"]
        self.edges = balanced(work, _MOST_LAYERS) if length > _MOST_LAYERS else tuple(range(length + 1))
        levels = (0,) * length if recompute == "none" else tuple(len(b.options) - 1 for b in problem.chain.blocks)
        self.levels, self.num = levels, len(self.edges) - 1
        shape = (self.num, self.num + 1)
        self.seconds, self.static, self.each, self.once = (np.full(shape, np.inf) for _ in range(4))
        for k in range(self.num):
            for end in range(k + 1, self.num + 1):
                (cost,) = evaluator.costs_of_levels((self.edges[k], self.edges[end]), levels)
                self.seconds[k, end] = cost.forward_s + cost.backward_s
                self.static[k, end] = cost.static_bytes + (problem.chain.input_bytes if k == 0 else 0.0)
                self.each[k, end] = cost.saved_bytes + cost.input_bytes
                running = (cost.forward_peak_bytes - cost.saved_bytes, cost.backward_peak_bytes + cost.output_bytes)
                self.once[k, end] = max(running)
        x = problem.chain.columns["output_bytes"]
        link = problem.cluster.link
        self.link = [0.0, *(2 * link.seconds(float(x[edge - 1])) for edge in self.edges[1:-1]), 0.0]


class _State(NamedTuple):
    """Layers [0, end) left, ordinary devices left, the special device's load and memory so far, delay behind layer
    `end`.
    """

    end: int
    ordinary: int
    load_s: float
    memory_bytes: float
    delay_s: float


class _Program:
    """Depth-first search for an allocation that meets one target period; states known to fail are remembered."""

    def __init__(self, problem: Problem, facts: _Facts, target_s: float) -> None:
        self.facts, self.target_s, self.num_devices = facts, target_s, problem.cluster.num_devices
        self.memory_bytes = problem.cluster.memory_bytes
        self.failed: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
        self.visits = 0

    def plus(self, delay: float, seconds: float) -> float:
        """V (+) U of the paper."""
        periods = max(math.ceil(delay / self.target_s - 1e-9), 1)
        if math.ceil((delay + seconds) / self.target_s - 1e-9) > periods:
            return self.target_s * periods + seconds
        return delay + seconds

    def solve(self) -> Allocation | None:
        """An allocation whose loads all stay within the target, if one is found."""
        stages = self._search(_State(self.facts.num, self.num_devices - 1, 0.0, 0.0, 0.0))
        return None if stages is None else self._named(stages[::-1])

    def _search(self, state: _State) -> list[tuple[int, bool]] | None:
        """(first layer, is special) of the stages that cover layers [0, end), last stage first."""
        if state.end == 0:
            return []
        left = float(self.facts.seconds[0, state.end])
        if left > state.ordinary * self.target_s + self.target_s - state.load_s or self.visits > _MOST_VISITS:
            return None
        if self._is_hopeless(state):
            return None
        self.visits += 1
        for k in range(state.end):
            for special in (False, True):
                after = self._after(state, k, special) if special or state.ordinary else None
                rest = None if after is None else self._search(after)
                if rest is not None:
                    return [(k, special), *rest]
        self._remember(state)
        return None

    def _is_hopeless(self, state: _State) -> bool:
        """Did a state with no more load, memory and delay fail? All three only ever make it harder."""
        return any(
            load <= state.load_s and memory <= state.memory_bytes and delay <= state.delay_s
            for load, memory, delay in self.failed.get(state[:2], ())
        )

    def _remember(self, state: _State) -> None:
        kept = self.failed.get(state[:2], [])
        bounds = state[2:]
        harder = [other for other in kept if all(mine <= its for mine, its in zip(bounds, other, strict=True))]
        self.failed[state[:2]] = [other for other in kept if other not in harder] + [bounds]

    def _after(self, state: _State, k: int, special: bool) -> _State | None:
        """The state once layers [k, end) are one stage; None if its load, link or memory doesn't fit."""
        facts, end = self.facts, state.end
        seconds, link = float(facts.seconds[k, end]), facts.link[k]
        load = state.load_s + seconds if special else state.load_s
        if max(seconds, link, load) > self.target_s * (1 + 1e-12):
            return None
        delay = self.plus(state.delay_s, seconds)
        in_flight = max(math.ceil(delay / self.target_s - 1e-9), 1) - special
        nbytes = float(facts.static[k, end] + in_flight * facts.each[k, end] + facts.once[k, end])
        memory = state.memory_bytes + nbytes if special else state.memory_bytes
        if max(nbytes, memory) > self.memory_bytes:
            return None
        return _State(k, state.ordinary - (not special), load, memory, self.plus(delay, link) if link else delay)

    def _named(self, stages: list[tuple[int, bool]]) -> Allocation:
        """Devices numbered in order of their first stage; adjacent stages of one device are merged."""
        cuts = [0]
        device_of: list[int] = []
        numbers: dict[str, int] = {}
        for number, (_, special) in enumerate(stages):
            key = "special" if special else str(number)
            end = stages[number + 1][0] if number + 1 < len(stages) else self.facts.num
            device = numbers.setdefault(key, len(numbers))
            if device_of and device_of[-1] == device:
                cuts.pop()
            else:
                device_of.append(device)
            cuts.append(self.facts.edges[end])
        return Allocation(tuple(cuts), tuple(device_of))


def allocate(problem: Problem, facts: _Facts) -> Allocation | None:
    """Bisect the target period; None if no target up to the whole work is reached."""
    work = float(facts.seconds[0, facts.num])
    low, high = max(work / problem.cluster.num_devices, max(facts.link)), work
    best: Allocation | None = None
    for _ in range(9):
        middle = high if best is None and high == work else (low + high) / 2
        found = _Program(problem, facts, middle).solve()
        if found is None and middle == work:
            return None
        best, low, high = (found, low, middle) if found else (best, middle, high)
    return best


def plan_madpipe(problem: Problem) -> PipelinePlan:
    """Allocation by the dynamic program (without recomputation, with all of it if that does not fit), then the
    schedule.
    """
    clock, evaluator = Clock(), problem.evaluator()
    best: Candidate | None = None
    modes: tuple[Recompute, ...] = ("none", "full") if problem.recompute == "optimal" else (problem.recompute,)
    for mode in modes:
        facts = _Facts(problem, mode)
        found = allocate(problem, facts)
        if found is None:
            continue
        best = schedule_allocation(problem, evaluator, found.cuts, found.device_of, facts.levels, "madpipe")
        if best is None and found.device_of == tuple(range(problem.cluster.num_devices)):
            counts = in_flight_of(1.0, problem.cluster.num_devices, problem.num_microbatches)
            best = evaluator.evaluate(found.cuts, OneFOneBN(counts, problem.num_microbatches))
        if best:
            break
    contiguous = best is None or best.schedule.num_stages == best.schedule.num_devices
    return finish("madpipe", problem, evaluator, best, clock, interleaved=not contiguous)
