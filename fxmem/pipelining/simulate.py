"""Event-driven simulation of a pipeline schedule on P devices: step time, busy time and per-device memory over time.

Each device runs its action list in order. Each directed link carries one transfer at a time, in the order of
production; a transfer starts when its producer has ended, the receiver has posted it (one action ahead of its consumer)
and the link is free. Memory of a device: static bytes; a running action adds its transient for its whole duration; F's
end adds the saved bytes, and the output until it is sent; a transfer adds its bytes to the receiver when it starts; the
end of B or I gives up saved bytes, input and output gradient, and holds the input gradient until it is sent; I leaves
behind what W needs, until W's end. At equal times ends come before starts. A schedule is laid out once (`Layout`) and
priced many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fxmem.pipelining.chain import Cluster, FloatArray
from fxmem.pipelining.schedules import Action, DeadlockError, Schedule, verify_schedule

_MIN_S = 1e-12
"""A shortest duration: an action that takes no time would leave its transient bytes out of the peak."""


class StageCost(NamedTuple):
    """One stage's costs for one microbatch, recomputation included (seconds, bytes)."""

    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    static_bytes: float
    saved_bytes: float
    input_bytes: float
    output_bytes: float
    forward_peak_bytes: float
    backward_peak_bytes: float
    weight_saved_bytes: float = 0.0


class _Node(NamedTuple):
    """A step of the evaluation: starts after the ends of two nodes and the start of a third (-1: none)."""

    duration: int
    after: int
    also_after: int
    after_start: int


_KINDS = ("F", "B", "I", "W")
_NUM_DURATIONS = 6
"""Per stage: F, B, I, W, transfer to the next stage, transfer to the previous stage."""
_NUM_DELTAS = 11


@dataclass(frozen=True)
class Layout:
    """A schedule's dependence graph in evaluation order, and its memory events."""

    schedule: Schedule
    nodes: tuple[_Node, ...]
    actions: tuple[Action | None, ...]
    event_node: NDArray[np.intp]
    event_is_start: NDArray[np.bool_]
    event_delta: NDArray[np.intp]
    event_device: NDArray[np.intp]
    last_node: tuple[int, ...]

    @cached_property
    def device_starts(self) -> NDArray[np.intp]:
        """Index of each device's first event once events are sorted by device."""
        counts = np.bincount(self.event_device, minlength=self.schedule.num_devices)
        return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.intp)


@dataclass(frozen=True)
class Simulation:
    """What a run of a schedule costs; `start_s` and `end_s` belong to the layout's nodes."""

    step_s: float
    peak_bytes: tuple[float, ...]
    busy_s: tuple[float, ...]
    layout: Layout
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The idle fraction of all devices over the step."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)

    def timeline(self) -> list[tuple[int, Action, float, float]]:
        """(device, action, start, end) of every action, in order of start."""
        device_of = self.layout.schedule.device_of
        rows = [
            (device_of[action.stage], action, start, end)
            for action, start, end in zip(self.layout.actions, self.start_s, self.end_s, strict=True)
            if action is not None
        ]
        return sorted(rows, key=lambda row: (row[2], row[0]))


def simulate(schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster, input_bytes: float = 0.0) -> Simulation:
    """Run `schedule` with one cost per stage; `input_bytes` of every microbatch stand on the first stage's device.

    Raises DeadlockError (or OptionError) if the schedule can't run to its end.
    """
    layout = layout_of(schedule)
    durations = durations_of(schedule, costs, cluster)
    start, end = run_times(layout, durations)
    peaks = run_memory(layout, costs, start, end, input_bytes)
    busy = [0.0] * schedule.num_devices
    for action, begin, finish in zip(layout.actions, start, end, strict=False):
        if action is not None:
            busy[schedule.device_of[action.stage]] += finish - begin
    num = len(layout.nodes)
    return Simulation(step_of(layout, end), tuple(peaks), tuple(busy), layout, tuple(start[:num]), tuple(end[:num]))


def step_of(layout: Layout, end: Sequence[float]) -> float:
    return max(end[node] for node in layout.last_node)


def durations_of(schedule: Schedule, costs: Sequence[StageCost], cluster: Cluster) -> list[float]:
    """Seconds of each stage's F, B, I, W and of its transfers to the next and the previous stage."""
    durations: list[float] = []
    device_of, last = schedule.device_of, schedule.num_stages - 1
    for stage, cost in enumerate(costs):
        here = device_of[stage]
        forth = cluster.between(here, device_of[stage + 1]).seconds(cost.output_bytes) if stage < last else 0.0
        back = cluster.between(here, device_of[stage - 1]).seconds(cost.input_bytes) if stage else 0.0
        durations += [
            max(seconds, _MIN_S) for seconds in (cost.forward_s, cost.backward_s, cost.input_s, cost.weight_s)
        ]
        durations += [forth, back]
    return durations


def run_times(layout: Layout, durations: Sequence[float]) -> tuple[list[float], list[float]]:
    """Start and end of every node; the lists have one more entry (0.0), which stands for "no predecessor"."""
    num = len(layout.nodes)
    start, end = [0.0] * (num + 1), [0.0] * (num + 1)
    for number, (duration, after, also_after, after_start) in enumerate(layout.nodes):
        begin, other = end[after], end[also_after]
        if other > begin:
            begin = other
        other = start[after_start]
        if other > begin:
            begin = other
        start[number] = begin
        end[number] = begin + durations[duration]
    return start, end


def _deltas(costs: Sequence[StageCost]) -> FloatArray:
    """Per stage, the bytes that each kind of event adds to its device (see `_events_of`)."""
    last = len(costs) - 1
    table = []
    for stage, c in enumerate(costs):
        x_in = c.input_bytes if stage else 0.0
        x_out = c.output_bytes if stage < last else 0.0
        freed = -c.backward_peak_bytes - c.saved_bytes - x_in - x_out + x_in
        table += [
            c.forward_peak_bytes, -c.forward_peak_bytes + c.saved_bytes + x_out,
            c.backward_peak_bytes, freed,
            c.backward_peak_bytes, freed + c.weight_saved_bytes,
            -c.weight_saved_bytes,
            x_in, -x_out, x_out, -x_in,
        ]  # fmt: skip
    return np.array(table)


def run_memory(
    layout: Layout, costs: Sequence[StageCost], start: Sequence[float], end: Sequence[float], input_bytes: float = 0.0
) -> list[float]:
    """The largest number of bytes that each device holds at any time."""
    times = np.where(layout.event_is_start, np.array(start)[layout.event_node], np.array(end)[layout.event_node])
    order = np.lexsort((layout.event_is_start, times, layout.event_device))
    total = np.cumsum(_deltas(costs)[layout.event_delta[order]])
    firsts = layout.device_starts
    before = np.concatenate([[0.0], total[firsts[1:] - 1]])
    tops = np.maximum(np.maximum.reduceat(total, firsts) - before, 0.0)
    schedule = layout.schedule
    for stage, cost in enumerate(costs):
        tops[schedule.device_of[stage]] += cost.static_bytes
    tops[schedule.device_of[0]] += input_bytes * schedule.num_microbatches
    return [float(top) for top in tops]


def layout_of(schedule: Schedule) -> Layout:
    """The schedule's layout, made once; verifies the schedule."""
    layout = schedule.__dict__.get("_layout")
    if layout is None:
        verify_schedule(schedule)
        layout = _Builder(schedule).build()
        schedule.__dict__["_layout"] = layout
    return layout


class _Builder:
    """Lays out actions and transfers as one graph and sorts it topologically."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.actions = [action for row in schedule.actions for action in row]
        self.index: dict[tuple[int, str, int], int] = {}
        self.previous: list[int] = []
        number = 0
        for row in schedule.actions:
            for position, action in enumerate(row):
                kind = "B" if action.kind == "I" else action.kind
                self.index[action.stage, kind, action.microbatch] = number
                self.previous.append(number - 1 if position else -1)
                number += 1
        self.transfers: list[tuple[int, int, bool]] = []
        """(producer, consumer, is forward), numbered after the actions, each link's in order of production."""
        self._find_transfers()

    def _find_transfers(self) -> None:
        self.incoming: dict[int, int] = {}
        """Consumer action to the transfer it waits for, or to the action on its own device."""
        self.links: dict[tuple[int, int], list[int]] = {}
        last, device_of = self.schedule.num_stages - 1, self.schedule.device_of
        for number, action in enumerate(self.actions):
            stage, kind, microbatch = action
            target = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= target <= last:
                continue
            consumer = self.index[target, "F" if kind == "F" else "B", microbatch]
            here, there = device_of[stage], device_of[target]
            if here == there:
                self.incoming[consumer] = number
            else:
                transfer = len(self.actions) + len(self.transfers)
                self.transfers.append((number, consumer, kind == "F"))
                self.incoming[consumer] = transfer
                self.links.setdefault((here, there), []).append(transfer)

    def _raw_nodes(self) -> list[_Node]:
        nodes = []
        for number, action in enumerate(self.actions):
            duration = action.stage * _NUM_DURATIONS + _KINDS.index(action.kind)
            nodes.append(_Node(duration, self.previous[number], self.incoming.get(number, -1), -1))
        before, posted = self._link_order()
        for offset, (producer, _, forward) in enumerate(self.transfers):
            number = len(self.actions) + offset
            duration = self.actions[producer].stage * _NUM_DURATIONS + (4 if forward else 5)
            nodes.append(_Node(duration, producer, before[number], posted[number]))
        return nodes

    def _link_order(self) -> tuple[dict[int, int], dict[int, int]]:
        """Each transfer's predecessor on its link, and the action whose start posts it.

        A later transfer can only be received after the earlier ones, so the earliest post of those behind it counts
        too.
        """
        before, posted = {}, {}
        for queue in self.links.values():
            for first, second in zip([-1, *queue], queue, strict=False):
                before[second] = first
            earliest = len(self.actions)
            for transfer in reversed(queue):
                consumer = self.transfers[transfer - len(self.actions)][1]
                earliest = min(earliest, consumer)
                posted[transfer] = self.previous[earliest]
        return before, posted

    def build(self) -> Layout:
        raw = self._raw_nodes()
        order = self._topological(raw)
        place = {number: position for position, number in enumerate(order)}
        place[-1] = -1
        nodes = tuple(_Node(raw[number].duration, *(place[p] for p in raw[number][1:])) for number in order)
        count = len(self.actions)
        actions = tuple(self.actions[number] if number < count else None for number in order)
        events = [event for position, number in enumerate(order) for event in self._events_of(position, number)]
        columns = list(zip(*events, strict=True))
        ends = {self.schedule.device_of[a.stage]: place[i] for i, a in enumerate(self.actions)}
        return Layout(
            self.schedule, nodes, actions, np.array(columns[0], dtype=np.intp), np.array(columns[1], dtype=bool),
            np.array(columns[2], dtype=np.intp), np.array(columns[3], dtype=np.intp), tuple(ends.values()),
        )  # fmt: skip

    def _topological(self, raw: Sequence[_Node]) -> list[int]:
        waiting = [sum(p >= 0 for p in node[1:]) for node in raw]
        followers: list[list[int]] = [[] for _ in raw]
        for number, node in enumerate(raw):
            for predecessor in node[1:]:
                if predecessor >= 0:
                    followers[predecessor].append(number)
        ready = [number for number, count in enumerate(waiting) if count == 0]
        for number in ready:
            for follower in followers[number]:
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
        if len(ready) < len(raw):
            raise DeadlockError(f"the transfers of schedule {self.schedule.name} wait for each other")
        return ready

    def _events_of(self, position: int, number: int) -> list[tuple[int, bool, int, int]]:
        """(node, is start, delta index, device): deltas per stage are F start/end, B start/end, I start/end, W end,
        forward received/sent, backward received/sent."""
        device_of = self.schedule.device_of
        if number < len(self.actions):
            stage, kind, _ = self.actions[number]
            first = stage * _NUM_DELTAS + {"F": 0, "B": 2, "I": 4, "W": 6}[kind]
            if kind == "W":
                return [(position, False, first, device_of[stage])]
            return [(position, True, first, device_of[stage]), (position, False, first + 1, device_of[stage])]
        producer, consumer, forward = self.transfers[number - len(self.actions)]
        source, target = self.actions[producer].stage, self.actions[consumer].stage
        received, sent = (7, 8) if forward else (9, 10)
        return [
            (position, True, target * _NUM_DELTAS + received, device_of[target]),
            (position, False, source * _NUM_DELTAS + sent, device_of[source]),
        ]
