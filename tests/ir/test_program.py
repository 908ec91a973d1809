"""Program: structure, verification, printing, JSON."""

import dataclasses

import pytest
import sympy
from hypothesis import given

from fxmem.errors import VerifyError
from fxmem.ir import Op, Program, Storage, sizes
from fxmem.planners.problem import reduce_program
from fxmem.testing import programs


def two_op_program(nbytes=8):
    """input -> a -> view of a -> loss; backward reads the view."""
    return Program(
        name="two",
        ops=(
            Op(0, "x", "input", "forward", (), (0,), is_input=True, recomputable=False),
            Op(1, "a", "aten.relu", "forward", (0,), (1,), seconds=1.0),
            Op(2, "v", "aten.view", "forward", (1,), (1,)),
            Op(3, "loss", "aten.sum", "forward", (2,), (2,), seconds=1.0),
            Op(4, "g", "aten.mul", "backward", (2, 3), (3,), seconds=2.0),
        ),
        storages=tuple(Storage(i, n) for i, n in enumerate((4, nbytes, 1, 8))),
        forward_outputs=(3,),
        backward_outputs=(4,),
        static=(0,),
    )


def test_views_share_and_fold():
    program = two_op_program()
    assert [op.name for op in program.ops if program.is_folded(op)] == ["v"]
    assert program.producer == (0, 1, 3, 4)
    problem = reduce_program(program)
    assert problem.kernel_op.tolist() == [1, 3, 4]
    assert problem.reads(2).tolist() == [1, 2]
    assert problem.base_bytes == 4


@given(programs())
def test_json_round_trip_keeps_everything(program):
    again = Program.from_json(program.to_json())
    assert again == program
    assert again.fingerprint == program.fingerprint
    assert str(again) == str(program)


def test_fingerprint_ignores_times_but_not_sizes():
    program = two_op_program()
    assert program.with_costs([0.0] * 5, [0] * 5).fingerprint == program.fingerprint
    assert two_op_program(nbytes=16).fingerprint != program.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"args": (4,)}, "later op"),
        ({"storages": (9,)}, "unknown storage"),
        ({"is_random": True}, "recomputable"),
        ({"seconds": -1.0}, "negative"),
        ({"index": 7}, "index"),
    ],
)
def test_verifier_names_the_op(changes, message):
    program = two_op_program()
    ops = list(program.ops)
    ops[1] = dataclasses.replace(ops[1], **changes)
    with pytest.raises(VerifyError, match=message):
        dataclasses.replace(program, ops=tuple(ops))


def test_forward_may_not_depend_on_backward():
    program = two_op_program()
    ops = [*program.ops, Op(5, "late", "aten.relu", "forward", (4,), (3,))]
    with pytest.raises(VerifyError, match="late depends on backward"):
        dataclasses.replace(program, ops=tuple(ops))


def test_symbolic_sizes():
    batch = sizes.symbol("s0")
    program = dataclasses.replace(two_op_program(batch * 4 + 8), hints={"s0": 10})
    assert program.nbytes() == [4, 48, 1, 8]
    assert program.nbytes({"s0": 2})[1] == 16
    with pytest.raises(VerifyError, match="s0"):
        program.nbytes({})
    assert Program.from_json(program.to_json()).storages == program.storages
    doubled = program.with_costs([1.0] * 5, [10] * 5).at({"s0": 22})
    assert (doubled.ops[1].seconds, doubled.ops[1].workspace_bytes) == (2.0, 20)


def test_size_json_is_data_not_code():
    expr = sympy.floor(sizes.symbol("s0") / 2) + sympy.Max(sizes.symbol("s1"), 3) * 4
    assert sizes.from_json(sizes.to_json(expr)) == expr
    with pytest.raises(VerifyError, match="unknown size function"):
        sizes.from_json(["__import__", "os"])


def test_printer(golden):
    golden("program", str(two_op_program()))
