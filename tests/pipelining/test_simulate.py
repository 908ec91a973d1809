"""The simulator against a slow, independent one that walks through time, and against hand-made numbers."""

from __future__ import annotations

import random

import pytest

from fxmem.pipelining.chain import Cluster, Link
from fxmem.pipelining.schedules import Action, Schedule, gpipe, one_f_one_b, one_f_one_b_n, torch_schedule, zero_bubble
from fxmem.pipelining.simulate import StageCost, simulate


def _random_costs(rng: random.Random, num_stages: int) -> list[StageCost]:
    x = [0.0, *(float(rng.randint(1, 9)) for _ in range(num_stages - 1)), 0.0]
    return [
        StageCost(
            float(rng.randint(1, 9)), float(rng.randint(4, 12)), float(rng.randint(1, 6)), float(rng.randint(1, 6)),
            float(rng.randint(0, 50)), float(rng.randint(1, 30)), x[s], x[s + 1], float(rng.randint(30, 60)),
            float(rng.randint(0, 30)), float(rng.randint(0, 9)),
        )
        for s in range(num_stages)
    ]  # fmt: skip


class _Oracle:
    """Discrete-event simulation with explicit queues and a byte counter that is only ever added to."""

    def __init__(self, schedule: Schedule, costs: list[StageCost], cluster: Cluster) -> None:
        self.schedule, self.costs, self.cluster = schedule, costs, cluster
        self.position = [0] * schedule.num_devices
        self.running: dict[int, tuple[float, Action]] = {}
        self.begun = [0] * schedule.num_devices
        self.arrived: set[tuple[int, str, int]] = set()
        self.queues: dict[tuple[int, int], list[tuple[int, str, int, int]]] = {}
        self.moving: dict[tuple[int, int], tuple[float, tuple[int, str, int, int]]] = {}
        self.used = [0.0] * schedule.num_devices
        for stage, cost in enumerate(costs):
            self.used[schedule.device_of[stage]] += cost.static_bytes
        self.peak = list(self.used)

    def add(self, device: int, nbytes: float) -> None:
        self.used[device] += nbytes
        self.peak[device] = max(self.peak[device], self.used[device])

    def run(self) -> float:
        now, last = 0.0, 0.0
        while True:
            self.settle(now)
            ends = [end for end, _ in self.running.values()] + [end for end, _ in self.moving.values()]
            if not ends:
                return last
            now = min(ends)
            for device, (end, action) in list(self.running.items()):
                if end == now:
                    del self.running[device]
                    self.finish(device, action)
                    last = now
            for link, (end, message) in list(self.moving.items()):
                if end == now:
                    del self.moving[link]
                    self.deliver(link, message)

    def settle(self, now: float) -> None:
        changed = True
        while changed:
            changed = False
            for device, row in enumerate(self.schedule.actions):
                if device in self.running or self.position[device] == len(row):
                    continue
                action = row[self.position[device]]
                if self.ready(action):
                    self.begin(device, action, now)
                    changed = True
            for link, queue in self.queues.items():
                if queue and link not in self.moving and self.posted(link, queue):
                    self.send(link, queue.pop(0), now)
                    changed = True

    def ready(self, action: Action) -> bool:
        stage, kind, microbatch = action
        if kind == "W" or (kind == "F" and stage == 0) or (kind in "BI" and stage == len(self.costs) - 1):
            return True
        return (stage, "F" if kind == "F" else "B", microbatch) in self.arrived

    def begin(self, device: int, action: Action, now: float) -> None:
        cost = self.costs[action.stage]
        seconds = {"F": cost.forward_s, "B": cost.backward_s, "I": cost.input_s, "W": cost.weight_s}[action.kind]
        self.running[device] = (now + seconds, action)
        self.position[device] += 1
        self.add(device, {"F": cost.forward_peak_bytes, "W": 0.0}.get(action.kind, cost.backward_peak_bytes))

    def finish(self, device: int, action: Action) -> None:
        stage, kind, microbatch = action
        cost, last = self.costs[stage], len(self.costs) - 1
        if kind == "W":
            self.used[device] -= cost.weight_saved_bytes
            return
        if kind == "F":
            self.used[device] += cost.saved_bytes - cost.forward_peak_bytes
            if stage < last:
                self.hand_over(device, (stage + 1, "F", microbatch), cost.output_bytes)
            return
        self.used[device] -= cost.backward_peak_bytes + cost.saved_bytes
        self.used[device] -= (cost.input_bytes if stage else 0.0) + (cost.output_bytes if stage < last else 0.0)
        self.used[device] += cost.weight_saved_bytes if kind == "I" else 0.0
        if stage:
            self.hand_over(device, (stage - 1, "B", microbatch), cost.input_bytes)

    def hand_over(self, device: int, target: tuple[int, str, int], nbytes: float) -> None:
        self.used[device] += nbytes
        there = self.schedule.device_of[target[0]]
        if there == device:
            self.arrived.add(target)
        else:
            self.queues.setdefault((device, there), []).append((*target, int(nbytes)))

    def posted(self, link: tuple[int, int], queue: list[tuple[int, str, int, int]]) -> bool:
        """Has the receiver begun the action before the consumer, of this message or of one to be produced behind it?"""
        row = self.schedule.actions[link[1]]
        sender = self.schedule.actions[link[0]]
        names = [m[:3] for m in queue] + [t for a in sender[self.position[link[0]] :] if (t := self.target(a, link[1]))]
        if link[0] in self.running and (t := self.target(self.running[link[0]][1], link[1])):
            names.append(t)
        places = [n for n, a in enumerate(row) if (a.stage, "B" if a.kind == "I" else a.kind, a.microbatch) in names]
        return self.position[link[1]] >= min(places)

    def target(self, action: Action, there: int) -> tuple[int, str, int] | None:
        stage = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= stage < len(self.costs) or self.schedule.device_of[stage] != there:
            return None
        return stage, "F" if action.kind == "F" else "B", action.microbatch

    def send(self, link: tuple[int, int], message: tuple[int, str, int, int], now: float) -> None:
        self.moving[link] = (now + self.cluster.between(*link).seconds(message[3]), message)
        self.add(link[1], message[3])

    def deliver(self, link: tuple[int, int], message: tuple[int, str, int, int]) -> None:
        self.arrived.add(message[:3])
        self.used[link[0]] -= message[3]


def _schedules(rng: random.Random, costs: list[StageCost]) -> list[Schedule]:
    num = rng.randint(2, 6)
    counts = sorted((rng.randint(1, num) for _ in costs), reverse=True)
    seconds = [{"F": c.forward_s, "I": c.input_s, "W": c.weight_s} for c in costs]
    made = [gpipe(len(costs), num), one_f_one_b_n(counts, num), zero_bubble(seconds, counts, num)]
    if len(costs) % 2 == 0:
        devices = len(costs) // 2
        made += [torch_schedule(name, devices, 2 * devices, 2) for name in ("interleaved", "interleaved-zb", "zbv")]
    return made


@pytest.mark.parametrize("seed", range(25))
def test_step_and_peaks_equal_the_slow_simulators(seed: int) -> None:
    rng = random.Random(seed)
    costs = _random_costs(rng, rng.randint(1, 6))
    cluster = Cluster(len(costs), 1e9, Link(rng.choice((0.0, 0.25, 3.0)), rng.choice((1.0, 4.0, 64.0))))
    for schedule in _schedules(rng, costs):
        run = simulate(schedule, costs, cluster)
        oracle = _Oracle(schedule, costs, cluster)
        assert run.step_s == pytest.approx(oracle.run(), abs=1e-9), schedule.name
        assert run.peak_bytes == pytest.approx(oracle.peak), schedule.name


def test_hand_made_1f1b() -> None:
    cost = StageCost(1.0, 2.0, 1.0, 1.0, 100, 10, 3, 3, 13, 4)
    run = simulate(one_f_one_b(4, 8), [cost] * 4, Cluster(4, 1e9))
    assert run.step_s == (8 + 3) * 3.0
    assert run.busy_s == (24.0,) * 4
    assert run.bubble == pytest.approx(3 / 11)
    # one microbatch (10 + 3), its transient, the next input (posted one action ahead), a gradient to send
    assert run.peak_bytes[3] == 100 + 10 + 3 + 4 + 3


def test_input_microbatches_stand_on_the_first_device() -> None:
    cost = StageCost(1.0, 2.0, 1.0, 1.0, 0, 10, 3, 3, 13, 4)
    plain = simulate(one_f_one_b(2, 4), [cost] * 2, Cluster(2, 1e9))
    fed = simulate(one_f_one_b(2, 4), [cost] * 2, Cluster(2, 1e9), input_bytes=5.0)
    assert fed.peak_bytes[0] == plain.peak_bytes[0] + 20
    assert fed.peak_bytes[1] == plain.peak_bytes[1]
