"""Action lists: the same as torch's, complete, free of deadlock; in-flight counts against formulas and simulation."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import get_schedule_class

from fxmem.errors import OptionError
from fxmem.pipelining.chain import Cluster
from fxmem.pipelining.schedules import (
    TORCH_SCHEDULES,
    Action,
    DeadlockError,
    Schedule,
    _stand_in,
    gpipe,
    one_f_one_b,
    one_f_one_b_n,
    parse_actions,
    torch_schedule,
    verify_schedule,
    zero_bubble,
)
from fxmem.pipelining.simulate import StageCost, simulate

GRID = [(devices, num) for devices in range(1, 9) for num in (1, 2, 5, 8, 16, 32)]
CHUNKED = (
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved-zb", 2),
    ("zbv", 2),
    ("looped-bfs", 2),
    ("dualpipev", 2),
)


@pytest.mark.parametrize("devices", range(1, 9))
def test_own_gpipe_and_1f1b_are_torchs(devices: int) -> None:
    for num in (n for d, n in GRID if d == devices):
        assert torch_schedule("gpipe", devices, num).actions == gpipe(devices, num).actions
        if num >= devices:
            assert torch_schedule("1f1b", devices, num).actions == one_f_one_b(devices, num).actions


def _in_flight_over_time(schedule: Schedule) -> list[int]:
    """Per device, the most forwards begun and not given up, read off a simulated timeline."""
    cost = StageCost(1.0, 2.0, 1.0, 1.0, 0, 1, 0, 0, 1, 0)
    run = simulate(schedule, [cost] * schedule.num_stages, Cluster(schedule.num_devices, 1e9))
    most = []
    for device in range(schedule.num_devices):
        events = [(start, 1) for d, a, start, _ in run.timeline() if d == device and a.kind == "F"]
        events += [(end, -1) for d, a, _, end in run.timeline() if d == device and a.kind in "BI"]
        count = top = 0
        for _, change in sorted(events):
            count += change
            top = max(top, count)
        most.append(top)
    return most


_CHANGES = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": -1}


def _torchs_counts(name: str, devices: int, num: int, chunks: int) -> list[int]:
    """Per device, the most forwards not yet given up, read off torch's own objects. Raises what torch raises."""
    make: Any = get_schedule_class(TORCH_SCHEDULES[name])
    stages = [_stand_in(0, devices, devices * chunks) for _ in range(chunks)]
    order = make(stages if chunks > 1 else stages[0], num).pipeline_order
    counts = []
    for rank in range(devices):
        held, most = Counter[int](), 0
        for action in filter(None, order[rank]):
            for part in action.sub_actions or (action,):
                held[part.stage_index] += _CHANGES.get(part.computation_type.name, 0)
                most = max(most, held.total())
        counts.append(most)
    return counts


def test_every_schedule_class_of_torch_is_known() -> None:
    torchs = {name for name in vars(schedules) if name.startswith("Schedule")}
    assert torchs == {get_schedule_class(name).__name__ for name in TORCH_SCHEDULES.values()}


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), *CHUNKED])
def test_in_flight_counts_from_simulation_equal_torchs(name: str, chunks: int) -> None:
    """Every schedule, up to 8 devices and 32 microbatches, wherever torch can make it."""
    compared = set()
    for devices, num in GRID:
        try:
            expected = _torchs_counts(name, devices, num, chunks)
        except (ValueError, AssertionError):
            with pytest.raises(OptionError):
                torch_schedule(name, devices, num, chunks)
            continue
        schedule = torch_schedule(name, devices, num, chunks)
        verify_schedule(schedule)
        assert _in_flight_over_time(schedule) == expected == list(schedule.in_flight), (devices, num)
        compared.add((devices, num))
    assert {(devices, 32) for devices in (2, 4, 8)} <= compared


@pytest.mark.parametrize(("devices", "num"), GRID)
def test_in_flight_formulas(devices: int, num: int) -> None:
    assert gpipe(devices, num).in_flight == (num,) * devices
    assert one_f_one_b(devices, num).in_flight == tuple(min(num, devices - s) for s in range(devices))
    for chunks in (2, 3):
        try:
            schedule = torch_schedule("interleaved", devices, num, chunks)
        except OptionError:
            assert num % max(1, num // devices), "torch refuses only microbatches that don't fill its rounds"
            continue
        per_round = num // max(1, num // devices)
        expected = [min(num * chunks, (devices - d - 1) * 2 + (chunks - 1) * per_round + 1) for d in range(devices)]
        assert list(schedule.in_flight) == expected


def test_1f1b_n_runs_exactly_when_counts_never_rise() -> None:
    rng = random.Random(3)
    outcomes = set()
    for _ in range(300):
        counts = [rng.randint(1, 5) for _ in range(rng.randint(2, 5))]
        schedule = one_f_one_b_n(counts, 6)
        falls = all(a >= b for a, b in itertools.pairwise(counts))
        outcomes.add(falls)
        if falls:
            verify_schedule(schedule)
            assert schedule.in_flight == tuple(counts)
        else:
            with pytest.raises(DeadlockError, match=r"device \d waits before"):
                verify_schedule(schedule)
    assert outcomes == {True, False}


def test_deadlock_and_malformed_lists_are_named() -> None:
    forward, backward = [Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]
    crossed = Schedule("crossed", 1, (0, 1), (tuple(forward[::-1]), tuple(backward)))
    with pytest.raises(DeadlockError, match="0B0"):
        verify_schedule(crossed)
    missing = Schedule("missing", 1, (0, 1), (tuple(forward), tuple(backward[:1])))
    with pytest.raises(OptionError, match="stage 1 microbatch 0"):
        verify_schedule(missing)
    half_split = Schedule("half", 1, (0,), ((Action(0, "F", 0), Action(0, "I", 0)),))
    with pytest.raises(OptionError, match="whole backward"):
        verify_schedule(half_split)
    with pytest.raises(OptionError, match="at least one"):
        one_f_one_b_n([1, 0], 4)


def test_torch_action_names_round_trip() -> None:
    schedule = torch_schedule("zbv", 2, 4, 2)
    assert tuple(parse_actions(row) for row in schedule.as_csv_rows()) == schedule.actions
    assert parse_actions(["None", "0REDUCE_GRAD", "3SEND_F1", "(1F2;0B1)OVERLAP_F_B"]) == (
        Action(1, "F", 2),
        Action(0, "B", 1),
    )


def test_zero_bubble_holds_its_limits_and_fills_bubbles() -> None:
    cost = StageCost(1.0, 2.0, 1.0, 1.0, 0, 1, 0, 0, 1, 0)
    seconds = [{"F": 1.0, "I": 1.0, "W": 1.0}] * 4
    plain = simulate(one_f_one_b(4, 8), [cost] * 4, Cluster(4, 1e9))
    for limits in ([4, 3, 2, 1], [7, 5, 3, 1], [8, 8, 8, 8]):
        schedule = zero_bubble(seconds, limits, 8)
        verify_schedule(schedule)
        pending = [0] * 4
        for row in schedule.actions:
            for stage, kind, _ in row:
                pending[stage] += {"F": 1, "W": -1}.get(kind, 0)
                assert 0 <= pending[stage] <= limits[stage]
        assert simulate(schedule, [cost] * 4, Cluster(4, 1e9)).step_s <= plain.step_s
    assert simulate(zero_bubble(seconds, [8] * 4, 8), [cost] * 4, Cluster(4, 1e9)).step_s < 0.85 * plain.step_s
