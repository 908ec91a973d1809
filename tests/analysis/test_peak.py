"""Liveness, the peak and its symbolic form."""

import functools
from dataclasses import replace

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.analysis.devices import round_up
from fxmem.analysis.liveness import liveness, plain_actions
from fxmem.analysis.peak import peak, peak_expr, solve_max
from fxmem.errors import OptionError
from fxmem.ir import sizes
from fxmem.ir.program import Op, Program, Storage
from fxmem.schedule import simulate
from fxmem.testing import Shape, oracle_peak_bytes, programs, schedules

A, B = sizes.symbol("a"), sizes.symbol("b")


@functools.cache
def byte_sizes() -> list[int | sympy.Expr]:
    """Sizes as captured graphs have them: polynomials, some rounded. Built once: sympy is slow at it."""
    plain = [0, 7, A, 4 * A, 9 * A + 5, 3 * A * B, A * B + 2 * B, 4 * A**2 + 6 * B, (A - 1) * 5]
    rounded = [round_up(size, 4) for size in (5 * A + 1, A * B)]
    return [
        *map(sizes.plain, plain),
        *rounded,
        sympy.floor(A / 2) * B * 3,
        sympy.Max(2 * A, 5 * B),
        sympy.Mod(A, 3) * B,
    ]


@st.composite
def symbolic_programs(draw: st.DrawFn) -> Program:
    program = draw(programs(Shape(num_forward=(2, 5))))
    storages = tuple(replace(s, nbytes=draw(st.sampled_from(byte_sizes()))) for s in program.storages)
    return replace(program, storages=storages, hints={"a": draw(st.integers(1, 5)), "b": draw(st.integers(1, 5))})


@settings(max_examples=40)
@given(data=st.data(), program=symbolic_programs())
def test_the_expression_equals_the_simulator_at_any_sizes(data: st.DataObject, program: Program) -> None:
    actions = data.draw(st.none() | schedules(program))
    expr = peak_expr(program, actions)
    chosen = plain_actions(program) if actions is None else actions
    for _ in range(3):
        values = {name: data.draw(st.integers(1, 40)) for name in program.hints}
        at = program.at(values)
        assert sizes.evaluate(expr, values) == simulate(at, chosen).peak_bytes == oracle_peak_bytes(at, chosen)


@settings(max_examples=40)
@given(data=st.data(), program=programs())
def test_holders_add_up_at_every_step(data: st.DataObject, program: Program) -> None:
    live = liveness(program, data.draw(st.none() | schedules(program)))
    for step in range(len(live.actions)):
        assert sum(h.nbytes for h in live.holders(step)) == live.result.bytes_at[step]
    found = peak(program)
    assert sum(nbytes for _, nbytes in found.at_peak) == found.peak_bytes == peak_expr(program)


def _chain(num_ops: int, nbytes: sympy.Expr, weight_bytes: int) -> Program:
    """x, w -> op0 -> ... -> loss; each backward op reads its op's output and makes a gradient of the weight's size."""
    ops = [
        Op(0, "x", "input", "forward", (), (0,), is_input=True),
        Op(1, "w", "input", "forward", (), (1,), is_input=True, source="model.py:3: self.w"),
    ]
    storages: list[Storage] = [Storage(0, nbytes), Storage(1, weight_bytes)]

    def add(name: str, backward: bool, args: tuple[int, ...], *made: int | sympy.Expr) -> int:
        fresh = tuple(range(len(storages), len(storages) + len(made)))
        storages.extend(Storage(s, n) for s, n in zip(fresh, made, strict=True))
        ops.append(Op(len(ops), name, name, "backward" if backward else "forward", args, fresh, workspace_bytes=0))
        return len(ops) - 1

    last, outputs = 0, []
    for i in range(num_ops):
        last = add(f"op{i}", False, (last, 1), nbytes)
        outputs.append(last)
    gradient, gradients = last, []
    for i in reversed(range(num_ops)):
        gradient = add(f"grad{i}", True, (outputs[i], gradient), nbytes, weight_bytes)
        gradients.append(gradient)
    hints = {s.name: 2 for s in sympy.sympify(nbytes).free_symbols}
    return Program("chain", tuple(ops), tuple(storages), (last,), tuple(gradients), static=(1,), hints=hints)


def test_the_expression_of_a_deep_chain_stays_short() -> None:
    expr = peak_expr(_chain(40, 4 * A * B, 1000))
    assert len(expr.args if isinstance(expr, sympy.Max) else [expr]) <= 3
    assert {s.name for s in expr.free_symbols} == {"a", "b"}


def test_what_stands_at_the_peak_is_named() -> None:
    program = _chain(3, 4 * A, 5000)
    found = peak(program)
    assert found.op == "grad0"
    assert ("w (parameter) model.py:3: self.w", 5000) in found.at_peak
    kinds = {h.name: h.kind for h in found.holders}
    assert kinds["x"] == "input"
    assert kinds["grad2"] == "gradient"
    assert {h.kind for h in liveness(program).holders(1)} >= {"saved", "parameter"}


def test_the_largest_batch_is_exactly_the_last_that_fits() -> None:
    expr = peak_expr(_chain(5, 4 * A * B, 1000))
    for budget_bytes in (10_000, 123_456, 10**9):
        found = solve_max(expr, "a", budget_bytes, {"b": 7})
        at = [sizes.evaluate(expr, {"a": found + i, "b": 7}) for i in (0, 1)]
        assert at[0] <= budget_bytes < at[1]
    assert solve_max(expr, A, 100, {"b": 7}) == 0
    with pytest.raises(OptionError, match="does not depend on c"):
        solve_max(expr, "c", 100)
