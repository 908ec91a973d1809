"""From cuts and a schedule to the cheapest recomputation that fits: propose by curves, accept by simulation.

A schedule's action list gives, per device, which activations are held when an action runs (`occupancy`); that is a
lower bound of the device's bytes for any recomputation state. The simulator then says how much the true peak exceeds it
(queued sends, receives posted early), and the device steps down its curve by that much until the simulation fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fxmem.pipelining.chain import Chain, Cluster, FloatArray
from fxmem.pipelining.curves import Curves, Recompute, Span, StageCurve
from fxmem.pipelining.schedules import Action, Schedule, one_f_one_b_n, zero_bubble
from fxmem.pipelining.simulate import StageCost, durations_of, layout_of, run_memory, run_times, step_of

Cuts = tuple[int, ...]
"""Boundaries of the stages: 0, ..., L."""


class Occupied(NamedTuple):
    """While `kind` runs on local stage `stage`: activations held per local stage, and what W still needs."""

    kind: str
    stage: int
    held: tuple[int, ...]
    pending: tuple[int, ...]


class ScheduleMaker(Protocol):
    """Something that lays out a schedule, perhaps from the stages' durations."""

    num_microbatches: int

    @property
    def device_of(self) -> tuple[int, ...]: ...

    def occupancy(self) -> tuple[tuple[Occupied, ...], ...]:
        """Per device, the rows that no other row dominates."""
        ...

    def build(self, costs: Sequence[StageCost], cluster: Cluster) -> Schedule: ...


class FixedSchedule:
    """A schedule that doesn't depend on durations."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.num_microbatches, self.device_of = schedule, schedule.num_microbatches, schedule.device_of

    def occupancy(self) -> tuple[tuple[Occupied, ...], ...]:
        return occupancy(self.schedule)

    def build(self, costs: Sequence[StageCost], cluster: Cluster) -> Schedule:
        return self.schedule


class OneFOneBN:
    """1F1B with a vector of in-flight counts; laid out only when it is simulated."""

    def __init__(self, in_flight: Sequence[int], num_microbatches: int) -> None:
        self.in_flight = tuple(min(n, num_microbatches) for n in in_flight)
        self.num_microbatches, self.device_of = num_microbatches, tuple(range(len(in_flight)))

    def occupancy(self) -> tuple[tuple[Occupied, ...], ...]:
        return tuple((Occupied("F", 0, (n - 1,), (0,)), Occupied("B", 0, (n,), (0,))) for n in self.in_flight)

    def build(self, costs: Sequence[StageCost], cluster: Cluster) -> Schedule:
        return one_f_one_b_n(self.in_flight, self.num_microbatches)


class ZeroBubble:
    """Zero-bubble list scheduling under in-flight limits; laid out anew for every set of durations."""

    def __init__(self, limits: Sequence[int], num_microbatches: int) -> None:
        self.in_flight = tuple(min(limit, num_microbatches) for limit in limits)
        self.num_microbatches, self.device_of = num_microbatches, tuple(range(len(limits)))

    def occupancy(self) -> tuple[tuple[Occupied, ...], ...]:
        return tuple((Occupied("F", 0, (n - 1,), (0,)), Occupied("I", 0, (n,), (0,))) for n in self.in_flight)

    def build(self, costs: Sequence[StageCost], cluster: Cluster) -> Schedule:
        seconds = [{"F": c.forward_s, "I": c.input_s, "W": c.weight_s} for c in costs]
        links = [cluster.between(s, s + 1).seconds(c.output_bytes) for s, c in enumerate(costs[:-1])]
        return zero_bubble(seconds, self.in_flight, self.num_microbatches, [*links, 0.0])


def occupancy(schedule: Schedule) -> tuple[tuple[Occupied, ...], ...]:
    """What each device holds while its actions run, without dominated rows; kept on the schedule."""
    kept: tuple[tuple[Occupied, ...], ...] | None = schedule.__dict__.get("_occupancy")
    if kept is None:
        kept = tuple(
            _occupied(actions, stages) for actions, stages in zip(schedule.actions, schedule.stages_on, strict=True)
        )
        schedule.__dict__["_occupancy"] = kept
    return kept


def _occupied(actions: Sequence[Action], stages: Sequence[int]) -> tuple[Occupied, ...]:
    held, pending = [0] * len(stages), [0] * len(stages)
    rows: set[Occupied] = set()
    for action in actions:
        local = stages.index(action.stage)
        rows.add(Occupied(action.kind, local, tuple(held), tuple(pending)))
        held[local] += {"F": 1, "W": 0}.get(action.kind, -1)
        pending[local] += {"I": 1, "W": -1}.get(action.kind, 0)
    return tuple(row for row in sorted(rows) if row.kind != "W" and not any(_dominates(other, row) for other in rows))


def _dominates(other: Occupied, row: Occupied) -> bool:
    same = other.kind == row.kind and other.stage == row.stage and other != row
    return same and all(a >= b for a, b in zip(other.held + other.pending, row.held + row.pending, strict=True))


@dataclass(frozen=True)
class Candidate:
    """A simulated plan: `levels[b]` is the option of block b."""

    cuts: Cuts
    schedule: Schedule
    levels: tuple[int, ...]
    step_s: float
    peak_bytes: tuple[float, ...]
    maker: ScheduleMaker


class DeviceCurve(NamedTuple):
    """One device's stages: curve, least bytes per state, total extra seconds per state."""

    stages: tuple[int, ...]
    curve: StageCurve
    need: FloatArray


class Evaluator:
    """Turns (cuts, schedule) into simulated candidates under the cluster's memory."""

    def __init__(self, chain: Chain, cluster: Cluster, recompute: Recompute = "optimal") -> None:
        self.chain, self.cluster = chain, cluster
        self.curves = Curves(chain, recompute)
        self.sums = {name: self.curves.prefix(name).tolist() for name in chain.columns}
        self.x = [0.0, *self.curves.output_bytes.tolist()[:-1], 0.0]
        """Bytes that cross each boundary, both ends 0."""
        self.num_simulations = 0
        self._made: dict[object, DeviceCurve] = {}

    def evaluate(
        self, cuts: Cuts, maker: ScheduleMaker, cutoff_s: float = float("inf"), rounds: int = 6
    ) -> Candidate | None:
        """The cheapest recomputation that fits in simulation; None if none was found or the step is not under
        `cutoff_s`.
        """
        devices = self.devices(cuts, maker)
        excess = [0.0] * len(devices)
        best: Candidate | None = None
        states: list[int] | None = None
        for _ in range(rounds):
            chosen = self._states(devices, excess)
            if chosen is None or chosen == states:
                break
            states = chosen
            limit = best.step_s if best else cutoff_s
            simulated = self._simulate(cuts, maker, devices, states, limit)
            if simulated is None:
                break
            if max(simulated.peak_bytes) <= self.cluster.memory_bytes:
                best = simulated
            excess = [
                peak - float(device.need[state])
                for peak, device, state in zip(simulated.peak_bytes, devices, states, strict=True)
            ]
        return best

    def _states(self, devices: Sequence[DeviceCurve], excess: Sequence[float]) -> list[int] | None:
        states = []
        for device, above in zip(devices, excess, strict=True):
            fits = device.need <= self.cluster.memory_bytes - above
            state = int(fits.argmax())
            if not fits[state]:
                return None
            states.append(state)
        return states

    def devices(self, cuts: Cuts, maker: ScheduleMaker) -> list[DeviceCurve]:
        devices = []
        for number, rows in enumerate(maker.occupancy()):
            stages = tuple(s for s, device in enumerate(maker.device_of) if device == number)
            spans = tuple((cuts[s], cuts[s + 1]) for s in stages)
            devices.append(self._device((stages, spans, rows), maker.num_microbatches))
        return devices

    def _device(
        self, key: tuple[tuple[int, ...], tuple[Span, ...], tuple[Occupied, ...]], num_microbatches: int
    ) -> DeviceCurve:
        if (key, num_microbatches) not in self._made:
            stages, spans, rows = key
            weights = tuple(float(max(row.held[k] for row in rows)) for k in range(len(stages)))
            curve = self.curves.of(spans, weights)
            self._made[key, num_microbatches] = DeviceCurve(stages, curve, self.need(curve, rows, num_microbatches))
        return self._made[key, num_microbatches]

    def need(self, curve: StageCurve, rows: Sequence[Occupied], num_microbatches: int) -> FloatArray:
        """Bytes that the device holds at least, per state."""
        static, kept = 0.0, []
        for i, j in curve.spans:
            static += self.sums["static_bytes"][j] - self.sums["static_bytes"][i]
            static += self.chain.input_bytes * num_microbatches if i == 0 else 0.0
            kept.append(self.sums["weight_saved_bytes"][j] - self.sums["weight_saved_bytes"][i])
        x_in = [self.x[i] for i, _ in curve.spans]
        tops = []
        for row in rows:
            i, j = curve.spans[row.stage]
            forward = row.kind == "F"
            running = curve.forward_peak_bytes[row.stage] if forward else curve.backward_peak_bytes[row.stage]
            total = running + (self.x[i] if forward else self.x[j])
            for stage, (held, pending) in enumerate(zip(row.held, row.pending, strict=True)):
                total = total + held * (curve.saved_bytes[stage] + x_in[stage]) + pending * kept[stage]
            tops.append(total)
        return np.asarray(static + np.maximum.reduce(tops), dtype=float)

    def costs(self, cuts: Cuts, devices: Sequence[DeviceCurve], states: Sequence[int]) -> list[StageCost]:
        costs: list[StageCost | None] = [None] * (len(cuts) - 1)
        for device, state in zip(devices, states, strict=True):
            curve = device.curve
            for local, stage in enumerate(device.stages):
                values = (array[local, state] for array in (
                    curve.extra_s, curve.saved_bytes, curve.forward_peak_bytes, curve.backward_peak_bytes,
                ))  # fmt: skip
                costs[stage] = self._cost(cuts[stage], cuts[stage + 1], *map(float, values))
        return [cost for cost in costs if cost is not None]

    def _cost(self, i: int, j: int, extra: float, saved: float, forward: float, backward: float) -> StageCost:
        def total(name: str) -> float:
            return float(self.sums[name][j] - self.sums[name][i])

        input_s, weight_s = total("backward_input_s"), total("backward_weight_s")
        return StageCost(
            total("forward_s"), input_s + weight_s + extra, input_s + extra, weight_s, total("static_bytes"), saved,
            self.x[i], self.x[j], forward, backward, total("weight_saved_bytes"),
        )  # fmt: skip

    def _simulate(
        self, cuts: Cuts, maker: ScheduleMaker, devices: Sequence[DeviceCurve], states: Sequence[int], limit: float
    ) -> Candidate | None:
        costs = self.costs(cuts, devices, states)
        if least_step_s(costs, maker, self.cluster) >= limit:
            return None
        return self._run(cuts, maker, costs, limit, lambda: self._levels(devices, states))

    def simulate_levels(
        self, cuts: Cuts, maker: ScheduleMaker, levels: Sequence[int], limit_s: float = float("inf")
    ) -> Candidate | None:
        """The candidate whose block b runs option `levels[b]`, fitting or not; None if its step is not under
        `limit_s`.
        """
        return self._run(cuts, maker, self.costs_of_levels(cuts, levels), limit_s, lambda: tuple(levels))

    def _run(
        self,
        cuts: Cuts,
        maker: ScheduleMaker,
        costs: list[StageCost],
        limit: float,
        levels: Callable[[], tuple[int, ...]],
    ) -> Candidate | None:
        schedule = maker.build(costs, self.cluster)
        if schedule.least_s >= limit:
            return None
        layout = layout_of(schedule)
        start, end = run_times(layout, durations_of(schedule, costs, self.cluster))
        self.num_simulations += 1
        step = step_of(layout, end)
        if step >= limit:
            return None
        peaks = run_memory(layout, costs, start, end, self.chain.input_bytes)
        return Candidate(cuts, schedule, levels(), step, tuple(peaks), maker)

    def _levels(self, devices: Sequence[DeviceCurve], states: Sequence[int]) -> tuple[int, ...]:
        levels = np.zeros(len(self.chain), dtype=np.intp)
        for device, state in zip(devices, states, strict=True):
            blocks = np.concatenate([np.arange(i, j) for i, j in device.curve.spans])
            levels[blocks] = device.curve.levels[state]
        return tuple(levels.tolist())

    def costs_of_levels(self, cuts: Cuts, levels: Sequence[int]) -> list[StageCost]:
        """Stage costs when block b runs option `levels[b]`."""
        chosen = np.arange(len(self.chain)), np.asarray(levels, dtype=np.intp)
        saved, extra = self.curves.option_bytes[chosen], self.curves.option_s[chosen]
        costs = []
        for i, j in itertools.pairwise(cuts):
            numbers = self.curves.stage_bytes(i, j, saved[None, i:j])
            costs.append(self._cost(i, j, float(extra[i:j].sum()), *(float(array[0]) for array in numbers)))
        return costs


def least_step_s(costs: Sequence[StageCost], maker: ScheduleMaker, cluster: Cluster) -> float:
    """A quick lower bound on the step: the busiest device's work; with one stage per device its place in the line too.

    Whole backwards: lead plus work, and a stage with n microbatches in flight starts forward k + n only after backward
    k, which takes a round trip. Split backwards: the lead of forwards plus the stage's work.
    """
    in_flight = getattr(maker, "in_flight", ())
    if len(in_flight) != len(costs):
        loads = [0.0] * cluster.num_devices
        for device, cost in zip(maker.device_of, costs, strict=True):
            loads[device] += cost.forward_s + cost.backward_s
        return maker.num_microbatches * max(loads) * (1 - 1e-9)
    links = [
        cluster.between(s, s + 1).seconds(c.output_bytes) + cluster.between(s + 1, s).seconds(c.output_bytes)
        for s, c in enumerate(costs[:-1])
    ]
    num, least, lead = maker.num_microbatches, 0.0, 0.0
    if isinstance(maker, ZeroBubble):
        for cost in costs:
            least = max(least, lead + num * (cost.forward_s + cost.input_s + cost.weight_s))
            lead += cost.forward_s
        return least * (1 - 1e-9)
    behind = sum(cost.forward_s + cost.backward_s for cost in costs) + sum(links)
    for cost, n, link in zip(costs, in_flight, [*links, 0.0], strict=True):
        work, trips = cost.forward_s + cost.backward_s, (num - 1) // n
        round_trips = (trips + 1) * behind + (num - trips * n - 1) * cost.backward_s
        least = max(least, lead + max(num * work, round_trips))
        lead += work + link
        behind -= work + link
    return least * (1 - 1e-9)
