"""How much planning is done: by what it can win, and less from a plan to start from."""

from dataclasses import replace

import numpy as np
import pytest

from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import Kernel
from fxmem.planners.plan import Plan, make_plan
from fxmem.planners.problem import reduce_program
from fxmem.planners.recompute.replay import started, state_of
from fxmem.planners.stakes import STEPS, stakes
from fxmem.schedule import Compute
from tests.planners.models import blocks, irregular


def faster(program: Program, times: float) -> Program:
    """The same program on a machine so many times as fast."""
    return replace(program, ops=tuple(replace(op, seconds=op.seconds / times) for op in program.ops))


def planned(program: Program, budget: float | str, options: Options) -> tuple[Plan, float]:
    """The plan, and the seconds of effort that it took."""
    mine = replace(options, effort=Effort())
    return make_plan(program, budget, "auto", mine), mine.effort.now()


def test_a_limit_is_what_a_few_hundred_steps_can_win() -> None:
    problem = reduce_program(blocks(12))
    limit = stakes(problem, Options())
    assert limit.until(1.0, 1e-3) == pytest.approx(max(limit.least_s, STEPS * 1e-3))
    assert limit.until(0.5, 1e9) == pytest.approx(0.5 * limit.limit_s)
    assert limit.until(1.0, 0.0) == limit.least_s
    asked = stakes(problem, Options(solve_s=2.0))
    assert asked.until(1.0, 0.0) == 2.0


def test_short_steps_are_planned_in_less() -> None:
    program = faster(irregular(40), 1e6)
    problem = reduce_program(program)
    plan, spent_s = planned(program, 0.4, Options())
    _, asked_s = planned(program, 0.4, Options(solve_s=0.6))
    assert plan.lower_bound_s < plan.extra_s
    assert spent_s <= 1.1 * (stakes(problem, Options()).least_s + STEPS * plan.extra_s) < 0.4 < asked_s


def test_a_start_saves_effort_and_is_kept_where_it_is_best() -> None:
    program = faster(irregular(40), 1e5)
    first, first_s = planned(program, 0.4, Options())
    like = replace(program, extra_resident_bytes=program.extra_resident_bytes + 4096)
    again, again_s = planned(like, first.peak_bytes + 4096, Options(start=first.actions))
    assert again_s <= 0.5 * first_s
    assert again.extra_s <= first.extra_s + 1e-12


def test_a_start_may_name_saved_storages_and_need_not_fit() -> None:
    program = blocks(6)
    problem = reduce_program(program)
    everything = frozenset(range(problem.num_storages + 5))
    assert started(problem, everything).saved.all()
    plan, _ = planned(program, 0.4, Options(start=everything))
    assert plan.peak_bytes <= 0.4 * plan.baseline_peak_bytes


def test_a_start_of_another_program_is_taken_as_far_as_it_goes() -> None:
    larger, problem = make_plan(blocks(8), 0.4, "auto", Options(solve_s=0.2)), reduce_program(blocks(6))
    state = started(problem, larger.actions)
    assert len(state.saved) == problem.num_storages
    plan, _ = planned(blocks(6), 0.4, Options(start=larger.actions, solve_s=0.2))
    assert plan.peak_bytes <= 0.4 * plan.baseline_peak_bytes


def test_replaying_a_plan_gives_its_figures() -> None:
    plan, problem = make_plan(blocks(6), 0.4, "auto", Options(solve_s=0.2)), reduce_program(blocks(6))
    kernel = Kernel(problem)
    kernel.load(state_of(problem, plan.actions))
    score = kernel.evaluate(plan.peak_bytes)
    assert score.peak_bytes <= plan.peak_bytes
    assert score.extra_s == pytest.approx(plan.extra_s)
    assert np.count_nonzero([isinstance(action, Compute) for action in plan.actions]) == problem.num_kernels
