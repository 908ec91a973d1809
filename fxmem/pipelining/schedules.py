"""Pipeline schedules as action lists: one in-order list per device, the same list that is simulated and run.

Where torch.distributed.pipelining has the schedule, its own list is parsed (`torch_schedule`); what it lacks is made
here: `one_f_one_b_n` (any vector of in-flight counts) and `zero_bubble` (list scheduling of F, I and W with a memory
limit).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from fxmem.errors import FxmemError, OptionError

Kind = Literal["F", "B", "I", "W"]
_NEVER = float("inf")
_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)(?!\d)")


class DeadlockError(FxmemError):
    """The devices of a schedule would wait for each other for ever; the message shows where each one stands."""


class Action(NamedTuple):
    """Forward, full backward, input gradient or weight gradient of one microbatch on one stage; prints as `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """`actions[d]` is the order on device d; `device_of[s]` says where stage s lives.

    `least_s` is a lower bound on the step, where the maker knows one.
    """

    name: str
    num_microbatches: int
    device_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    least_s: float = field(default=0.0, compare=False)

    @property
    def num_stages(self) -> int:
        return len(self.device_of)

    @property
    def num_devices(self) -> int:
        return len(self.actions)

    @cached_property
    def is_split(self) -> bool:
        """Does any stage split its backward into I and W?"""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    @cached_property
    def stages_on(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, in chain order."""
        return tuple(
            tuple(stage for stage, device in enumerate(self.device_of) if device == d) for d in range(self.num_devices)
        )

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Per device, the largest number of forwards whose activations are not yet given up by B or I."""
        return tuple(_largest_count(actions) for actions in self.actions)

    @cached_property
    def in_flight_of_stage(self) -> tuple[int, ...]:
        """The same per stage."""
        return tuple(
            _largest_count([a for a in self.actions[device] if a.stage == stage])
            for stage, device in enumerate(self.device_of)
        )

    def as_csv_rows(self) -> list[list[str]]:
        """One row of action names per device: the compute-only form that torch's schedule runtime loads."""
        return [[str(action) for action in actions] for actions in self.actions]

    def __str__(self) -> str:
        rows = (f"device {device}: {' '.join(map(str, actions))}" for device, actions in enumerate(self.actions))
        return "\n".join([f"{self.name}, {self.num_microbatches} microbatches", *rows])


def _largest_count(actions: Sequence[Action]) -> int:
    count = largest = 0
    for action in actions:
        count += {"F": 1, "W": 0}.get(action.kind, -1)
        largest = max(largest, count)
    return largest


@lru_cache(maxsize=64)
def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965)."""
    schedule = one_f_one_b_n([num_microbatches] * num_stages, num_microbatches)
    return Schedule("gpipe", num_microbatches, schedule.device_of, schedule.actions)


@lru_cache(maxsize=64)
def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Warm-up of P - s - 1 forwards, then one forward and one backward in turn (Narayanan et al. 2019)."""
    schedule = one_f_one_b_n(range(num_stages, 0, -1), num_microbatches)
    return Schedule("1f1b", num_microbatches, schedule.device_of, schedule.actions)


def one_f_one_b_n(in_flight: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B whose stage s keeps at most `in_flight[s]` microbatches; deadlock-free iff the vector never rises."""
    return _one_f_one_b_n(tuple(min(n, num_microbatches) for n in in_flight), num_microbatches)


@lru_cache(maxsize=4096)
def _one_f_one_b_n(in_flight: tuple[int, ...], num_microbatches: int) -> Schedule:
    if any(n < 1 for n in in_flight):
        raise OptionError(f"every stage needs at least one microbatch in flight, not {list(in_flight)}")
    rows = []
    for stage, warm in enumerate(in_flight):
        kinds = "F" * warm + "BF" * (num_microbatches - warm) + "B" * warm
        seen: Counter[str] = Counter()
        row = []
        for kind in kinds:
            row.append(Action(stage, "F" if kind == "F" else "B", seen[kind]))
            seen[kind] += 1
        rows.append(tuple(row))
    name = f"1f1b-n{list(in_flight)}"
    return Schedule(name, num_microbatches, tuple(range(len(in_flight))), tuple(rows))


def zero_bubble(
    seconds: Sequence[Mapping[str, float]],
    limits: Sequence[int],
    num_microbatches: int,
    link_s: Sequence[float] | None = None,
) -> Schedule:
    """List scheduling with I before F before W; F waits while forwards minus finished W's reach the stage's limit.

    `seconds[s]` has the durations of "F", "I" and "W"; `link_s[s]` the transfer time between stages s and s + 1. Source
    of the split: Qi et al. 2023 (arXiv:2401.10241). Raises OptionError where a limit is below one.
    """
    if any(limit < 1 for limit in limits):
        raise OptionError(f"every stage needs at least one microbatch in flight, not {list(limits)}")
    builder = _ListScheduler(seconds, limits, num_microbatches, link_s or [0.0] * len(seconds))
    rows = builder.run()
    return Schedule("zero-bubble", num_microbatches, tuple(range(len(seconds))), rows, least_s=max(builder.free))


class _ListScheduler:
    """State of the zero-bubble list scheduling: what each stage has done, when its inputs arrive, what it would do
    next.
    """

    def __init__(
        self, seconds: Sequence[Mapping[str, float]], limits: Sequence[int], num: int, link_s: Sequence[float]
    ) -> None:
        self.seconds, self.limits, self.num, self.link_s = seconds, limits, num, link_s
        self.last = len(seconds) - 1
        self.done: list[dict[Kind, int]] = [{"F": 0, "I": 0, "W": 0, "B": 0} for _ in seconds]
        self.free = [0.0] * len(seconds)
        self.arrival: list[dict[Kind, list[float]]] = [{"F": [], "I": []} for _ in seconds]
        self.arrival[0]["F"] = [0.0] * num
        self.rows: list[list[Action]] = [[] for _ in seconds]
        self.choices = [self._choice(stage) for stage in range(len(seconds))]

    def run(self) -> tuple[tuple[Action, ...], ...]:
        """Execute the earliest choice of all stages until everything is done."""
        for _ in range(3 * self.num * len(self.seconds)):
            start, _, stage, kind = min(self.choices)
            if start == _NEVER:
                raise DeadlockError(f"zero-bubble limits {list(self.limits)} leave every stage waiting")
            self._execute(stage, kind, start)
        return tuple(tuple(row) for row in self.rows)

    def _choice(self, stage: int) -> tuple[float, int, int, Kind]:
        """(start, rank, stage, kind) of the action that can start first; I before F before W at the same time."""
        done, free, arrival = self.done[stage], self.free[stage], self.arrival[stage]
        best: tuple[float, int, int, Kind] = (_NEVER, 3, stage, "W")
        if done["I"] < min(len(arrival["I"]), done["F"]):
            best = (max(free, arrival["I"][done["I"]]), 0, stage, "I")
        if done["F"] < len(arrival["F"]) and done["F"] - done["W"] < self.limits[stage]:
            best = min(best, (max(free, arrival["F"][done["F"]]), 1, stage, "F"))
        return min(best, (free, 2, stage, "W")) if done["W"] < done["I"] else best

    def _execute(self, stage: int, kind: Kind, start: float) -> None:
        end = start + self.seconds[stage][kind]
        self.rows[stage].append(Action(stage, kind, self.done[stage][kind]))
        self.done[stage][kind] += 1
        self.free[stage] = end
        if kind == "F" and stage == self.last:
            self.arrival[stage]["I"].append(end)
        elif kind == "F":
            self._arrives(stage + 1, "F", end + self.link_s[stage])
        elif kind == "I" and stage:
            self._arrives(stage - 1, "I", end + self.link_s[stage - 1])
        self.choices[stage] = self._choice(stage)

    def _arrives(self, stage: int, kind: Kind, when: float) -> None:
        self.arrival[stage][kind].append(when)
        self.choices[stage] = self._choice(stage)


TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""fxmem's name of each schedule that torch.distributed.pipelining makes, and torch's."""


@lru_cache(maxsize=256)
def torch_schedule(name: str, num_devices: int, num_microbatches: int, stages_per_device: int = 1) -> Schedule:
    """The action list that torch's schedule class of that name makes, idle steps and gradient reductions left out.

    Raises OptionError where torch refuses the combination (for instance fewer microbatches than stages under 1F1B).
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    if name not in TORCH_SCHEDULES:
        raise OptionError(f"unknown schedule {name!r}: expected one of {', '.join(TORCH_SCHEDULES)}")
    make: Any = get_schedule_class(TORCH_SCHEDULES[name])
    num_stages = num_devices * stages_per_device
    stages = [_stand_in(0, num_devices, num_stages) for _ in range(stages_per_device)]
    single = name in ("gpipe", "1f1b")
    try:
        order = make(stages[0] if single else stages, num_microbatches).pipeline_order
    except (ValueError, AssertionError) as error:
        raise OptionError(f"torch can't build {name!r} on {num_devices} devices: {error}") from error
    rows = tuple(parse_actions(map(str, order[rank])) for rank in range(num_devices))
    if name == "1f1b":  # torch 2.13 prints the last stage's forwards from 1; its run loop starts at 0
        rows = tuple(map(_renumbered, rows))
    device_of = {action.stage: device for device, row in enumerate(rows) for action in row}
    return Schedule(name, num_microbatches, tuple(device_of[stage] for stage in range(num_stages)), rows)


def _renumbered(row: Sequence[Action]) -> tuple[Action, ...]:
    """The same stages and kinds with the microbatches of each kind counted from 0."""
    seen: Counter[tuple[int, Kind]] = Counter()
    renumbered = []
    for action in row:
        renumbered.append(action._replace(microbatch=seen[action.stage, action.kind]))
        seen[action.stage, action.kind] += 1
    return tuple(renumbered)


def _stand_in(rank: int, num_devices: int, num_stages: int) -> SimpleNamespace:
    """What torch's schedule classes read of a stage while they lay out their action list."""
    return SimpleNamespace(
        stage_index=rank, num_stages=num_stages, group_size=num_devices, group_rank=rank, is_first=True, is_last=False,
        has_backward=True, submod=None, stage_index_to_group_rank=None,
    )  # fmt: skip


def parse_actions(names: Any) -> tuple[Action, ...]:
    """Action names as torch prints them ("2F0", "(1F3;0B1)OVERLAP_F_B", "None"); everything but compute is dropped."""
    return tuple(
        Action(int(stage), kind, int(microbatch)) for name in names for stage, kind, microbatch in _ACTION.findall(name)
    )


def verify_schedule(schedule: Schedule) -> None:
    """Every stage runs each microbatch forward and backward once, in an order that no device waits for ever on.

    Raises OptionError on missing or repeated actions and DeadlockError on a cyclic wait.
    """
    _verify_complete(schedule)
    done: set[tuple[int, str, int]] = set()
    position = [0] * schedule.num_devices
    progress = True
    while progress:
        progress = False
        for device, row in enumerate(schedule.actions):
            while position[device] < len(row) and _inputs_of(row[position[device]], schedule.num_stages) <= done:
                action = row[position[device]]
                done.add((action.stage, "B" if action.kind == "I" else action.kind, action.microbatch))
                position[device] += 1
                progress = True
    stuck = [d for d, row in enumerate(schedule.actions) if position[d] < len(row)]
    if stuck:
        lines = (
            f"  device {d} waits before {schedule.actions[d][position[d]]}, its action {position[d]}" for d in stuck
        )
        raise DeadlockError("\n".join([f"schedule {schedule.name} deadlocks:", *lines]))


def _inputs_of(action: Action, num_stages: int) -> set[tuple[int, str, int]]:
    stage, kind, microbatch = action
    if kind == "F":
        return {(stage - 1, "F", microbatch)} if stage else set()
    if kind == "W":
        return {(stage, "B", microbatch)}
    own = {(stage, "F", microbatch)}
    return own | {(stage + 1, "B", microbatch)} if stage + 1 < num_stages else own


def _verify_complete(schedule: Schedule) -> None:
    counts = Counter(action for row in schedule.actions for action in row)
    repeated = [str(action) for action, count in counts.items() if count > 1]
    misplaced = [str(a) for d, row in enumerate(schedule.actions) for a in row if schedule.device_of[a.stage] != d]
    missing = []
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            full, split = Action(stage, "B", microbatch) in counts, Action(stage, "I", microbatch) in counts
            whole = full != split and split == (Action(stage, "W", microbatch) in counts)
            if Action(stage, "F", microbatch) not in counts or not whole:
                missing.append(f"stage {stage} microbatch {microbatch}")
    if repeated or misplaced or missing:
        raise OptionError(
            f"schedule {schedule.name} is malformed: repeated {repeated[:4]}, on the wrong device {misplaced[:4]}, "
            f"without a forward or a whole backward {missing[:4]}"
        )
