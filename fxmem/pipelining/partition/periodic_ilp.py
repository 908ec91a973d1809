"""Periodic schedules of an allocation by integer programming (Beaumont, Eyraud-Dubois, Shilova 2021), solved with
HiGHS.

Operation o starts at t_o in [0, T] of every period and works there on microbatch (period - h_o). For a fixed period
T the precedences, the exclusion on devices and links, and the memory at each forward's start are linear in t, h and
the order variables y; the least T is found by bisection. The answer is unrolled over the step's microbatches into an
action list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.sparse import csc_array, csr_array

from fxmem.pipelining.chain import Cluster
from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, FixedSchedule
from fxmem.pipelining.partition.base import Clock, Problem, finish
from fxmem.pipelining.partition.onefoneb_star import star_proposals
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.schedules import Action, Kind, Schedule
from fxmem.pipelining.simulate import StageCost
from fxmem.planners.effort import Effort
from fxmem.planners.solver import minimise

_PRECISION = 0.005
_LIMIT_S = 5.0


class Operation(NamedTuple):
    """Forward ("F"), backward ("B") or transfer ("SF" to the next stage, "SB" to the previous) of a stage."""

    kind: str
    stage: int
    seconds: float
    resource: tuple[int, ...]


@dataclass(frozen=True)
class Periodic:
    """A periodic schedule: start and shift of every operation."""

    period_s: float
    operations: tuple[Operation, ...]
    start_s: tuple[float, ...]
    shift: tuple[int, ...]

    def in_flight(self, stage: int) -> int:
        """Microbatches between the start of the stage's forward and the end of its backward, at most."""
        at = {(o.kind, o.stage): number for number, o in enumerate(self.operations)}
        forward, backward = at["F", stage], at["B", stage]
        end_s = self.start_s[backward] + self.operations[backward].seconds
        ended = end_s <= self.start_s[forward] + 1e-6 * self.period_s
        return self.shift[backward] - self.shift[forward] + (0 if ended else 1)


def operations_of(costs: Sequence[StageCost], device_of: Sequence[int], cluster: Cluster) -> list[Operation]:
    """The operations of one microbatch, in order of precedence."""
    last = len(costs) - 1
    forth, back = [], []
    for stage, cost in enumerate(costs):
        forth.append(Operation("F", stage, cost.forward_s, (device_of[stage],)))
        back.append(Operation("B", stage, cost.backward_s, (device_of[stage],)))
        if stage < last and device_of[stage] != device_of[stage + 1]:
            pair = device_of[stage], device_of[stage + 1]
            forth.append(Operation("SF", stage, cluster.between(*pair).seconds(cost.output_bytes), pair))
            pair = pair[::-1]
            back.append(Operation("SB", stage + 1, cluster.between(*pair).seconds(cost.output_bytes), pair))
    return forth + back[::-1]


class PeriodicProgram:
    """The integer program of one allocation, for any period."""

    def __init__(
        self, costs: Sequence[StageCost], device_of: Sequence[int], cluster: Cluster, input_bytes: float = 0.0
    ) -> None:
        self.costs, self.device_of, self.cluster = costs, device_of, cluster
        self.operations = operations_of(costs, device_of, cluster)
        self.at = {(o.kind, o.stage): number for number, o in enumerate(self.operations)}
        self.pairs = [
            (a, b)
            for a, b in combinations(range(len(self.operations)), 2)
            if self.operations[a].resource == self.operations[b].resource
        ]
        self.pair_at = {pair: number for number, pair in enumerate(self.pairs)}
        self.input_bytes = input_bytes

    def least_period_s(self) -> float:
        """The largest load of a device or link."""
        loads: dict[tuple[int, ...], float] = {}
        for operation in self.operations:
            loads[operation.resource] = loads.get(operation.resource, 0.0) + operation.seconds
        return max(loads.values())

    def solve(self, period_s: float, *, weigh_stage: int | None = None) -> Periodic | None:
        """A schedule of this period that fits; least total in-flight bytes, or fewest in flight on `weigh_stage`."""
        count = len(self.operations)
        rows: list[dict[int, float]] = []
        lower: list[float] = []
        parts = [operation.seconds / period_s for operation in self.operations]
        self._add_precedence(rows, lower, parts)
        self._add_exclusion(rows, lower, parts)
        if weigh_stage is None:
            self._add_memory(rows, lower)
        objective = self._objective(weigh_stage)
        num_orders, most = len(self.pairs), float(count + 1)
        top = [1.0] * count + [most] * count + [1.0] * num_orders
        top[0] = top[count] = 0.0
        matrix = _matrix(rows, 2 * count + num_orders)
        integral = np.arange(len(top)) >= count
        gap = 0.01 if weigh_stage is None else 0.0
        answer = minimise(objective, matrix, np.array(lower), np.array(top), integral, Effort(), _LIMIT_S, gap)
        if answer.x is None:
            return None
        shifts = tuple(round(value) for value in answer.x[count : 2 * count])
        return Periodic(period_s, tuple(self.operations), tuple((period_s * answer.x[:count]).tolist()), shifts)

    def _objective(self, weigh_stage: int | None) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        count = len(self.operations)
        objective = np.zeros(2 * count + len(self.pairs))
        for stage, cost in enumerate(self.costs):
            weight = (cost.saved_bytes + cost.input_bytes) / self.cluster.memory_bytes
            if weigh_stage is not None:
                weight = 1.0 if stage == weigh_stage else 0.0
            for column, sign in self._held(stage, stage).items():
                objective[column] += sign * weight
        return objective

    def _order(self, before: int, after: int) -> tuple[int, float, float]:
        """(column, sign, constant) of "operation `before` precedes `after` within the period"."""
        first = 2 * len(self.operations)
        if before < after:
            return first + self.pair_at[before, after], 1.0, 0.0
        return first + self.pair_at[after, before], -1.0, 1.0

    def _held(self, stage: int, at_stage: int) -> dict[int, float]:
        """Coefficients of the microbatches that `stage` holds when `at_stage`'s forward starts, constants under -1."""
        count, held = len(self.operations), {-1: 0.0}
        forward, backward, now = self.at["F", stage], self.at["B", stage], self.at["F", at_stage]
        held[count + backward], held[count + forward] = 1.0, -1.0
        if stage == at_stage:
            held[-1] += 1.0
        else:
            column, sign, constant = self._order(forward, now)
            held[column], held[-1] = held.get(column, 0.0) + sign, held[-1] + constant
        column, sign, constant = self._order(backward, now)
        held[column], held[-1] = held.get(column, 0.0) - sign, held[-1] - constant
        return {column: value for column, value in held.items() if column >= 0 or value}

    def _add_precedence(self, rows: list[dict[int, float]], lower: list[float], parts: Sequence[float]) -> None:
        """`parts`: every operation's seconds in periods. The solver's tolerances are absolute: to it a period is 1."""
        count = len(self.operations)
        for before in range(count - 1):
            after = before + 1
            rows.append({after: 1.0, count + after: 1.0, before: -1.0, count + before: -1.0})
            lower.append(parts[before])

    def _add_exclusion(self, rows: list[dict[int, float]], lower: list[float], parts: Sequence[float]) -> None:
        """y = 1: a before b in the period, and b ends before a's next start; y = 0: the other way round."""
        for number, (a, b) in enumerate(self.pairs):
            order = 2 * len(self.operations) + number
            rows.append({b: 1.0, a: -1.0, order: -1.0})
            lower.append(parts[a] - 1.0)
            rows.append({a: 1.0, b: -1.0, order: 1.0})
            lower.append(parts[b])

    def _add_memory(self, rows: list[dict[int, float]], lower: list[float]) -> None:
        for at_stage, device in enumerate(self.device_of):
            here = [stage for stage, other in enumerate(self.device_of) if other == device]
            room = self.cluster.memory_bytes - sum(self.costs[stage].static_bytes for stage in here)
            room -= max(self._transient(stage) for stage in here) + (self.input_bytes if 0 in here else 0.0)
            row: dict[int, float] = {}
            for stage in here:
                each = self.costs[stage].saved_bytes + self.costs[stage].input_bytes
                for column, value in self._held(stage, at_stage).items():
                    row[column] = row.get(column, 0.0) - value * each
            constant = row.pop(-1, 0.0)
            scale = max(self.cluster.memory_bytes, 1.0)
            rows.append({column: value / scale for column, value in row.items()})
            lower.append((-room - constant) / scale)

    def _transient(self, stage: int) -> float:
        cost = self.costs[stage]
        return max(cost.forward_peak_bytes - cost.saved_bytes, cost.backward_peak_bytes + cost.output_bytes)


def _matrix(rows: Sequence[dict[int, float]], width: int) -> csc_array:
    where = [(number, column, value) for number, row in enumerate(rows) for column, value in row.items() if column >= 0]
    numbers, columns, values = zip(*where, strict=True)
    return csc_array(csr_array((values, (numbers, columns)), shape=(len(rows), width)))


def shortest_period(program: PeriodicProgram, most_s: float = math.inf) -> Periodic | None:
    """Bisect the period between the largest load and the sum of all operations; None if even that does not fit."""
    low = program.least_period_s()
    high = min(sum(operation.seconds for operation in program.operations), most_s)
    found = program.solve(low) or None
    if found:
        return found
    found = program.solve(high) if high >= low else None
    while found and high > low * (1 + _PRECISION):
        middle = (low + high) / 2
        better = program.solve(middle)
        found, low, high = (better, low, middle) if better else (found, middle, high)
    return found


def unroll(periodic: Periodic, device_of: Sequence[int], num_microbatches: int, name: str) -> Schedule:
    """The action list of one step: every operation of every microbatch at its absolute time, sorted per device."""
    starts: dict[int, list[tuple[float, Action]]] = {device: [] for device in sorted(set(device_of))}
    for operation, start, shift in zip(periodic.operations, periodic.start_s, periodic.shift, strict=True):
        if operation.kind in ("F", "B"):
            kind: Kind = "F" if operation.kind == "F" else "B"
            for microbatch in range(num_microbatches):
                when = start + periodic.period_s * (shift + microbatch)
                starts[device_of[operation.stage]].append((when, Action(operation.stage, kind, microbatch)))
    rows = tuple(tuple(action for _, action in sorted(row)) for row in starts.values())
    return Schedule(name, num_microbatches, tuple(device_of), rows)


def schedule_allocation(
    problem: Problem, evaluator: Evaluator, cuts: Cuts, device_of: Sequence[int], levels: Sequence[int], name: str
) -> Candidate | None:
    """The shortest periodic schedule of an allocation, run as one step; recomputation is re-solved for its order."""
    costs = evaluator.costs_of_levels(cuts, levels)
    program = PeriodicProgram(costs, device_of, problem.cluster, problem.chain.input_bytes * problem.num_microbatches)
    periodic = shortest_period(program)
    if periodic is None:
        return None
    maker = FixedSchedule(unroll(periodic, device_of, problem.num_microbatches, name))
    return evaluator.evaluate(cuts, maker)


def plan_periodic_ilp(problem: Problem, *, num_allocations: int = 3) -> PipelinePlan:
    """The best few 1F1B* allocations, each scheduled by the integer program."""
    clock, evaluator = Clock(), problem.evaluator()
    stars = [evaluator.evaluate(cuts, maker) for cuts, maker in star_proposals(problem)]
    starts = sorted((c for c in stars if c is not None), key=lambda c: c.step_s)
    best: Candidate | None = None
    devices = range(problem.cluster.num_devices)
    for cuts, levels in list({(c.cuts, c.levels): None for c in starts})[:num_allocations]:
        found = schedule_allocation(problem, evaluator, cuts, list(devices), levels, "periodic-ilp")
        if found and (best is None or found.step_s < best.step_s):
            best = found
    return finish("periodic-ilp", problem, evaluator, best, clock)
