"""MadPipe: allocations with one special device that may hold several stages (Beaumont, Eyraud-Dubois, Shilova 2022).

A dynamic program over the layers from the last to the first takes a target period; its state is the number of ordinary
devices left, the special device's load and memory so far, and the delay V behind the present layer (which fixes the
in-flight count of the next stage). Load, memory and delay are discretised, rounded up. The target is bisected; the
allocation is then scheduled by the periodic integer program.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fxmem.pipeline.chain import FloatArray
from fxmem.pipeline.curves import IntArray, Recompute
from fxmem.pipeline.evaluate import Candidate, Cuts, Evaluator, OneFOneBN
from fxmem.pipeline.partition.base import Clock, Problem, finish
from fxmem.pipeline.partition.periodic_ilp import schedule_allocation
from fxmem.pipeline.partition.proposals import balanced, in_flight_of
from fxmem.pipeline.plan import PipelinePlan

_GRID = 11
"""Values of the special device's load and of its memory."""
_DELAYS = 24
"""Values of the delay, up to 2 P periods."""
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


class _Program:
    """The dynamic program for one target period; tables have shape [load, memory, delay]."""

    def __init__(self, problem: Problem, facts: _Facts, target_s: float) -> None:
        self.facts, self.target_s, self.num_devices = facts, target_s, problem.cluster.num_devices
        self.memory_bytes = problem.cluster.memory_bytes
        self.loads = np.linspace(0, target_s, _GRID)[:, None, None]
        self.memories = np.linspace(0, self.memory_bytes, _GRID)[None, :, None]
        self.delays = np.linspace(0, 2 * self.num_devices * target_s, _DELAYS)[None, None, :]
        self.kept: dict[tuple[int, int], tuple[FloatArray, IntArray]] = {}

    def plus(self, delay: FloatArray, seconds: float) -> FloatArray:
        """V (+) U of the paper."""
        periods = np.maximum(np.ceil(delay / self.target_s - 1e-9), 1.0)
        crosses = np.ceil((delay + seconds) / self.target_s - 1e-9) > periods
        return np.asarray(np.where(crosses, self.target_s * periods + seconds, delay + seconds), dtype=float)

    def index(self, values: FloatArray, top: float, size: int) -> IntArray:
        """Grid index, rounded up; beyond the grid is `size`."""
        raw = np.ceil(values / top * (size - 1) - 1e-9)
        return np.minimum(raw, size).astype(np.intp)

    def value(self, end: int, ordinary: int) -> tuple[FloatArray, IntArray]:
        """Least largest load for layers [0, end) with `ordinary` devices left; and 2 k + (is special) of the best stage."""
        if (end, ordinary) in self.kept:
            return self.kept[end, ordinary]
        shape = (_GRID, _GRID, _DELAYS)
        best, choice = np.full(shape, np.inf), np.full(shape, -1, dtype=np.intp)
        if end == 0:
            best = np.broadcast_to(self.loads, shape).copy()
        else:
            for k in range(end):
                for special in (False, True):
                    if special or ordinary:
                        cost = self.through(k, end, ordinary, special)
                        better = cost < best
                        best, choice = np.where(better, cost, best), np.where(better, 2 * k + special, choice)
        self.kept[end, ordinary] = best, choice
        return best, choice

    def through(self, k: int, end: int, ordinary: int, special: bool) -> FloatArray:
        """The value if layers [k, end) are one stage, on the special device or on an ordinary one."""
        facts, shape = self.facts, (_GRID, _GRID, _DELAYS)
        seconds, link = float(facts.seconds[k, end]), facts.link[k]
        if seconds > self.target_s or link > self.target_s:
            return np.full(shape, np.inf)
        load, memory, delay, fits = self.after(k, end, special)
        below, _ = self.value(k, ordinary if special else ordinary - 1)
        inside = np.broadcast_to(fits & (load < _GRID) & (memory < _GRID) & (delay < _DELAYS), shape)
        where = (np.minimum(load, _GRID - 1), np.minimum(memory, _GRID - 1), np.minimum(delay, _DELAYS - 1))
        rest = below[np.broadcast_arrays(*where)]
        own = self.loads + seconds if special else seconds
        return np.where(inside, np.maximum(np.maximum(own, link), rest), np.inf)

    def after(self, k: int, end: int, special: bool) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
        """Grid state behind stage [k, end), and whether its memory fits."""
        facts = self.facts
        delay = self.plus(self.delays, float(facts.seconds[k, end]))
        in_flight = np.maximum(np.ceil(delay / self.target_s - 1e-9), 1.0) - (1.0 if special else 0.0)
        nbytes = facts.static[k, end] + in_flight * facts.each[k, end] + facts.once[k, end]
        used = self.memories + nbytes if special else nbytes
        load = self.loads + (float(facts.seconds[k, end]) if special else 0.0)
        memory = used if special else self.memories + 0 * nbytes
        behind = self.plus(delay, facts.link[k]) if facts.link[k] else delay
        return (
            self.index(load, self.target_s, _GRID),
            self.index(memory, self.memory_bytes, _GRID),
            self.index(behind, float(self.delays.max()), _DELAYS),
            used <= self.memory_bytes,
        )

    def solve(self) -> Allocation | None:
        """The allocation of least largest load, if it reaches the target."""
        value, _ = self.value(self.facts.num, self.num_devices - 1)
        return self.trace() if value[0, 0, 0] <= self.target_s * (1 + 1e-9) else None

    def trace(self) -> Allocation:
        end, ordinary, at = self.facts.num, self.num_devices - 1, (0, 0, 0)
        stages: list[tuple[int, bool]] = []
        while end:
            choice = int(self.value(end, ordinary)[1][at])
            k, special = choice // 2, bool(choice % 2)
            load, memory, delay, _ = self.after(k, end, special)
            arrays = np.broadcast_arrays(load, memory, delay)
            at = (int(arrays[0][at]), int(arrays[1][at]), int(arrays[2][at]))
            stages.append((k, special))
            end, ordinary = k, ordinary - (not special)
        stages.reverse()
        return self._named(stages)

    def _named(self, stages: list[tuple[int, bool]]) -> Allocation:
        """Devices numbered in order of their first stage; adjacent stages of one device are merged."""
        cuts, device_of, numbers = [0], [], {}
        for number, (k, special) in enumerate(stages):
            key = "special" if special else str(number)
            end = stages[number + 1][0] if number + 1 < len(stages) else self.facts.num
            device = numbers.setdefault(key, len(numbers))
            if device_of and device_of[-1] == device:
                cuts.pop()
            else:
                device_of.append(device)
            cuts.append(self.facts.edges[end])
            del k
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
    """Allocation by the dynamic program (without recomputation, with all of it if that does not fit), then the schedule."""
    clock, evaluator = Clock(), problem.evaluator()
    best: Candidate | None = None
    modes: tuple[Recompute, ...] = {"optimal": ("none", "full"), "none": ("none",), "full": ("full",)}[problem.recompute]
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
