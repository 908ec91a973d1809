"""Seeded bugs: every broken pass, schedule, planner, layout and engine is caught, and every right one passes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st

from fxmem.errors import OffloadError
from fxmem.ir.from_fx import program_from_joint
from fxmem.runtime.transfers.layout import lay_out
from fxmem.runtime.transfers.threads import ThreadEngine
from fxmem.testing import (
    check_engine,
    check_layout,
    check_pass,
    check_plan,
    check_planner,
    check_rewrite,
    graph_modules,
    joint_graphs,
    plans,
    programs,
    transfers,
)
from tests.testing import broken
from tests.testing.runs import run

MOST_EXAMPLES = 300


def assert_caught(strategy: st.SearchStrategy[Any], check: Callable[[Any], Any], *, kind: Any = AssertionError) -> None:
    with pytest.raises(kind):
        run(strategy, check, MOST_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("pass_", broken.RIGHT_PASSES)
def test_right_passes(pass_):
    run(graph_modules(), lambda gm: check_pass(pass_, gm), 30)


@pytest.mark.slow
@pytest.mark.parametrize("pass_", broken.BROKEN_PASSES)
def test_broken_passes(pass_):
    assert_caught(graph_modules(), lambda gm: check_pass(pass_, gm))


@pytest.mark.slow
@pytest.mark.parametrize("actions_of", broken.RIGHT_SCHEDULES)
def test_right_schedules(actions_of):
    run(plans(), lambda plan: check_plan(replace(plan, actions=actions_of(plan))), 50)


@pytest.mark.parametrize("actions_of", broken.BROKEN_SCHEDULES)
def test_broken_schedules(actions_of):
    assert_caught(plans(), lambda plan: check_plan(replace(plan, actions=actions_of(plan))))


@pytest.mark.slow
@pytest.mark.parametrize("order", broken.RIGHT_ORDERS)
def test_right_orders(order):
    run(joint_graphs(), lambda joint: _check_order(joint, order), 10)


@pytest.mark.parametrize("order", broken.BROKEN_ORDERS)
def test_broken_orders(order):
    assert_caught(joint_graphs(), lambda joint: _check_order(joint, order))


def _check_order(joint, order):
    check_rewrite(joint, order(program_from_joint(joint)))


def test_right_planner():
    run(programs(), lambda program: check_planner("full", program, _half(program)), 40)


@pytest.mark.parametrize("planner", [broken.saves_all, broken.proud])
def test_broken_planners(planner):
    assert_caught(programs(), lambda program: check_planner(planner, program, _half(program)))


def _half(program) -> int:
    return program.extra_resident_bytes + sum(program.nbytes()) // 2


def test_right_layouts():
    run(transfers(("host", "disk")), lambda drawn: check_layout(lay_out(drawn.slots, True)), 100)


@pytest.mark.parametrize("lay", [broken.shares_too_early, broken.forgets_the_second_reload])
def test_broken_layouts(lay):
    assert_caught(transfers(("host", "disk")), lambda drawn: check_layout(lay(drawn.slots, True)))


def test_right_engine():
    run(transfers(), lambda drawn: check_engine(lambda layout, hook: ThreadEngine(layout, None, hook), drawn), 40)


@pytest.mark.parametrize("engine", broken.BROKEN_ENGINES)
def test_broken_engines(engine):
    make = lambda layout, hook: engine(layout, None, hook)  # noqa: E731
    assert_caught(transfers(), lambda drawn: check_engine(make, drawn), kind=(AssertionError, OffloadError))
