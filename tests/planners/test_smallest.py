"""A budget that an error named as feasible is feasible, whatever a second search finds."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.plan import make_plan
from fxmem.planners.problem import Problem
from fxmem.planners.registry import PLANNERS, Solution, get_planner
from tests.planners.models import MIB, blocks
from tests.planners.test_offload import host


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`auto` searches well the first time it fails, and after that finds nothing."""
    auto, errors = get_planner("auto"), []

    def once(problem: Problem, budget_bytes: int, options: Options) -> Solution:
        if not errors:
            try:
                auto(problem, budget_bytes, options)
            except BudgetInfeasible as error:
                errors.append(error)
                raise
        raise BudgetInfeasible(budget_bytes, 2 * errors[0].min_bytes)

    monkeypatch.setitem(PLANNERS, "auto", once)
    yield
    assert errors


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("program", "options"), [(blocks(5), Options(solve_s=0.2)), (blocks(7), host(4 * MIB))], ids=["alone", "host"]
)
def test_the_smallest_budget_is_found_again(program: Program, options: Options) -> None:
    plan = make_plan(program, "min", "auto", options)
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    more = replace(program, extra_resident_bytes=3 * MIB)
    assert make_plan(more, plan.budget_bytes + 3 * MIB, "auto", options).peak_bytes == plan.peak_bytes + 3 * MIB
    with pytest.raises(BudgetInfeasible):
        make_plan(more, plan.budget_bytes, "auto", options)
    with pytest.raises(BudgetInfeasible):
        make_plan(program, plan.budget_bytes, "auto", replace(options, pinned=frozenset({0})))
