"""The simulator: bytes against an oracle, seconds by hand, every rule of a valid schedule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxmem.errors import VerifyError
from fxmem.planners.problem import reduce_program
from fxmem.runtime.transfers.layout import plan_layout
from fxmem.schedule import Compute, Free, Machine, Offload, Recompute, Reload, StartBackward, Wait, simulate
from fxmem.schedule.actions import action_from_json, action_to_json
from fxmem.schedule.simulate import Link
from fxmem.testing import check_schedule, programs, schedules
from tests.ir.test_program import two_op_program
from tests.planners.models import Builder

MACHINE = Machine({"host": Link(out_bytes_per_s=4.0, in_bytes_per_s=8.0, latency_s=0.5)})
SAVED = (Compute(1), Compute(3), StartBackward(), Compute(4))


@given(st.data())
def test_peak_equals_the_oracle(data):
    program = data.draw(programs())
    check_schedule(program, data.draw(schedules(program)))


@given(programs())
def test_everything_saved_takes_the_sum_of_seconds(program):
    problem = reduce_program(program)
    result = simulate(program, problem.actions(range(problem.num_kernels), problem.num_forward))
    assert result.seconds == problem.baseline_s
    assert result.recompute_s == result.stall_s == 0


def test_bytes_at_every_step():
    result = simulate(two_op_program(), SAVED)
    assert result.bytes_at.tolist() == [4 + 8, 4 + 8 + 1, 4 + 8 + 1, 4 + 8 + 1 + 8]
    assert (result.peak_bytes, result.peak_step) == (21, 3)


def test_recompute_drops_the_value_in_between():
    result = simulate(two_op_program(), (Compute(1), Compute(3), StartBackward(), Recompute(1), Compute(4)))
    assert result.bytes_at.tolist() == [12, 13, 5, 13, 21]
    assert (result.recompute_s, result.seconds) == (1.0, 5.0)


def test_offload_moves_bytes_at_program_points_and_waits():
    actions = (
        Compute(1),  # 0..1
        Offload(1),  # out: 1..3.5 (0.5 + 8 / 4)
        Compute(3),  # 1..2
        Free(1),  # compute waits until 3.5
        StartBackward(),
        Reload(1),  # in: 3.5..5 (0.5 + 8 / 8)
        Wait(1),
        Compute(4),  # 5..7
    )
    result = simulate(two_op_program(), actions, MACHINE)
    assert result.bytes_at.tolist() == [12, 12, 13, 5, 5, 13, 13, 21]
    assert (result.seconds, result.stall_s) == (7.0, 3.0)
    assert (dict(result.tier_peak_bytes), result.bytes_moved) == ({"host": 8}, 16)


def test_a_tier_gives_back_what_was_waited_for():
    b = Builder()
    made = [b.add("input", [], 4)]
    for _ in range(3):
        made.append(b.add("relu", [made[-1]], 64, 1.0))
    program = b.build("chain", [made[3]], [b.add("mul", made[1:], 64, 1.0, "backward")])
    away = {s: (Offload(s), Free(s), Reload(s), Wait(s)) for s in (1, 2)}
    end = (Compute(3), StartBackward(), Compute(4))
    apart = (Compute(1), *away[1], Compute(2), *away[2], *end)
    together = (Compute(1), *away[1][:1], Compute(2), *away[2], *away[1][1:], *end)
    for actions, nbytes in ((apart, 64), (together, 128)):
        assert simulate(program, actions, MACHINE).tier_peak_bytes == {"host": nbytes}
        assert plan_layout(program, actions).host_bytes == nbytes


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ((Compute(3),), "not on the device"),
        ((Compute(1), Compute(1)), "computed twice"),
        ((Recompute(1),), "recomputed before"),
        ((Compute(1), Compute(2)), "owns no bytes"),
        ((Compute(1), Compute(3), Compute(4)), "before StartBackward"),
        ((Compute(1), StartBackward(), StartBackward()), "started twice"),
        ((Compute(1), Compute(3), StartBackward()), "gone at the end"),
        ((Offload(0), *SAVED), "resident"),
        ((Compute(1), Free(1)), "no copy"),
        ((Compute(1), Offload(1), Reload(1)), "never given back"),
        ((Compute(1), Reload(1)), "never offloaded"),
        ((Compute(1), Wait(1)), "no reload is pending"),
        ((Compute(1), Offload(1), Free(1), Reload(1), Compute(3)), "before its reload was waited for"),
        ((Compute(1), Offload(1), Free(1), Compute(3)), "not on the device"),
    ],
)
def test_invalid_schedules_are_refused(actions, message):
    with pytest.raises(VerifyError, match=message):
        simulate(two_op_program(), actions, MACHINE)


def test_offload_needs_the_tier():
    with pytest.raises(VerifyError, match="no disk tier"):
        simulate(two_op_program(), (Compute(1), Offload(1, "disk"), *SAVED[1:]), MACHINE)


@pytest.mark.parametrize("action", [Compute(1), StartBackward(), Offload(2, "disk"), Wait(3)])
def test_action_json(action):
    assert action_from_json(action_to_json(action)) == action


@pytest.mark.parametrize("data", [["Explode"], ["Compute"], ["Compute", 1, 2]])
def test_unknown_action_json(data):
    with pytest.raises(VerifyError, match="unknown schedule action"):
        action_from_json(data)
