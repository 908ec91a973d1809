"""Tiny problems solved outright, against brute force; the bound on the peak against the least there is."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners import Options, get_planner
from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import Kernel
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.recompute.bound import least_bytes
from fxmem.planners.recompute.tiny import Outright, Tiny, is_tiny
from fxmem.schedule import SimResult, simulate
from fxmem.testing import Shape, programs
from tests.planners.brute import least_extra_s
from tests.planners.models import blocks


def run(problem: Problem, found: Outright) -> SimResult:
    return simulate(problem.program, problem.actions(found.order, found.num_forward))


def unplanned_bytes(problem: Problem) -> int:
    kernel = Kernel(problem)
    kernel.load(kernel.all_saved())
    return kernel.evaluate(0).peak_bytes


@settings(max_examples=12)
@given(programs(Shape(num_forward=(2, 5))), st.floats(0.3, 1.0))
def test_the_fastest_and_the_smallest_are_those_of_brute_force(program: Program, share: float) -> None:
    problem = reduce_program(program)
    budget = int(share * unplanned_bytes(problem))
    optimum = least_extra_s(problem, budget)
    tiny = Tiny(problem, Effort(), 10.0)
    fastest = tiny.fastest(budget)
    assert is_tiny(problem)
    assert tiny.is_solved
    if fastest is None:
        assert optimum == math.inf
    else:
        result = run(problem, fastest)
        assert result.peak_bytes <= budget
        assert result.seconds - problem.baseline_s == pytest.approx(optimum, abs=1e-9)
    smallest = tiny.smallest()
    assert smallest is not None
    assert (run(problem, smallest).peak_bytes <= budget) == (fastest is not None)


@settings(max_examples=50)
@given(programs(Shape(num_forward=(2, 7))))
def test_no_schedule_is_below_the_bound_on_the_peak(program: Program) -> None:
    problem = reduce_program(program)
    smallest = Tiny(problem, Effort(), 10.0).smallest()
    if smallest is not None:
        assert least_bytes(problem) <= run(problem, smallest).peak_bytes


def test_the_bound_counts_what_an_operand_takes_to_get_there() -> None:
    problem = reduce_program(blocks(2))
    alone = problem.base_bytes + max(
        int(problem.nbytes[[*problem.reads(k), *problem.writes(k)]].sum()) for k in range(problem.num_kernels)
    )
    smallest = Tiny(problem, Effort(), 10.0).smallest()
    assert alone < least_bytes(problem)
    assert smallest is None or least_bytes(problem) <= run(problem, smallest).peak_bytes


def test_auto_proves_the_plan_of_a_tiny_problem_in_hardly_any_effort() -> None:
    problem = reduce_program(blocks(1))
    options = Options()
    with pytest.raises(BudgetInfeasible) as refused:
        get_planner("auto")(problem, problem.base_bytes, options)
    found = get_planner("auto")(problem, refused.value.min_bytes, options)
    result = simulate(problem.program, found.actions)
    assert result.peak_bytes == refused.value.min_bytes
    assert result.seconds - problem.baseline_s == pytest.approx(found.lower_bound_s)
    assert options.effort.now() < 0.5
    with pytest.raises(BudgetInfeasible):
        get_planner("auto")(problem, refused.value.min_bytes - 1, options)


def test_no_end_within_the_effort_is_no_answer() -> None:
    problem = reduce_program(blocks(2))
    tiny = Tiny(problem, Effort(), 1e-4)
    assert tiny.fastest(int(0.5 * unplanned_bytes(problem))) is None
    assert not tiny.is_solved
