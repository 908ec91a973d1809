"""The compiled kernel against the simulator and against an oracle of its own."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.ir.program import Program
from fxmem.planners.kernel.binding import Kernel, State
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.recompute.evict import EXPONENTS
from fxmem.schedule import simulate
from fxmem.testing import programs
from tests.planners.models import MIB, Builder, blocks, many_users


def liveness_peak_bytes(problem: Problem, order: list[int]) -> int:
    """Peak of an order of kernels, told from lifetimes of instances collected by one forward walk."""
    born: dict[int, int] = {}
    spans: list[tuple[int, int, int]] = []
    last: dict[int, int] = {}
    for step, kernel in enumerate(order):
        for s in problem.reads(kernel).tolist():
            last[s] = step
        for s in problem.writes(kernel).tolist():
            if s in born and problem.keep_to_end[s]:
                spans.append((s, step, step))
                continue
            if s in born:
                spans.append((s, born[s], last[s]))
            born[s] = last[s] = step
    spans += [(s, first, len(order) if problem.keep_to_end[s] else last[s]) for s, first in born.items()]
    level = [problem.base_bytes + int(problem.workspace_bytes[k]) for k in order]
    for s, first, end in spans:
        for step in range(first, min(end, len(order) - 1) + 1):
            level[step] += int(problem.nbytes[s])
    return max(level, default=problem.base_bytes)


def check(kernel: Kernel, program: Program) -> None:
    """Peak and seconds of the current state agree with oracle and simulator; loading what is stored changes nothing."""
    problem = kernel.problem
    score = kernel.evaluate(0)
    order, num_forward = kernel.order()
    steps = kernel.steps()
    assert all(a < b for segment in set(steps.segments) for a, b in pairwise(steps.kernels[steps.segments == segment]))
    result = simulate(program, problem.actions(order, num_forward))
    assert score.peak_bytes == liveness_peak_bytes(problem, order)
    assert score.peak_bytes == max(result.peak_bytes, liveness_peak_bytes(problem, order))
    assert score.extra_s == pytest.approx(result.seconds - problem.baseline_s)
    kernel.load(kernel.store())
    assert kernel.evaluate(0) == score


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_random_states_agree_with_oracle_and_simulator(data: st.DataObject) -> None:
    program = data.draw(programs())
    problem = reduce_program(program)
    kernel = Kernel(problem)
    bits = data.draw(st.lists(st.integers(0, 1), min_size=problem.num_storages, max_size=problem.num_storages))
    backward = st.integers(problem.num_forward, problem.num_kernels - 1)
    drops = data.draw(st.lists(st.tuples(backward, st.integers(0, problem.num_storages - 1)), max_size=6))
    kernel.load(State(np.array(bits, dtype=np.uint8), tuple(drops)))
    check(kernel, program)


@given(programs(), st.floats(0.3, 1.0), st.integers(0, 3), st.integers(0, 2**20))
def test_eviction_repair_polish_and_search_end_in_states_that_agree(
    program: Program, share: float, which: int, seed: int
) -> None:
    kernel = Kernel(reduce_program(program))
    kernel.seed(seed)
    kernel.load(kernel.all_saved())
    budget = int(share * kernel.evaluate(0).peak_bytes)
    kernel.evict(budget, *EXPONENTS[which])
    check(kernel, program)
    for improve in (kernel.repair, kernel.polish, lambda limit: kernel.perturb(limit, 5.0, 3)):
        assert improve(budget).peak_bytes == kernel.evaluate(budget).peak_bytes
        check(kernel, program)


def test_repair_fits_and_polish_never_costs_time() -> None:
    kernel = Kernel(reduce_program(blocks(6)))
    kernel.load(kernel.all_saved())
    peak = kernel.evaluate(0).peak_bytes
    for share in (0.9, 0.7, 0.5):
        kernel.load(kernel.all_saved())
        repaired = kernel.repair(int(share * peak))
        polished = kernel.polish(int(share * peak))
        assert repaired.peak_bytes <= share * peak
        assert polished.peak_bytes <= share * peak
        assert polished.extra_s <= repaired.extra_s + 1e-12


@pytest.mark.parametrize(("num_blocks", "share"), [(3, 0.5), (6, 0.32), (8, 0.28), (12, 0.2)])
def test_repair_gets_past_a_step_that_no_single_decision_helps(num_blocks: int, share: float) -> None:
    kernel = Kernel(reduce_program(blocks(num_blocks)))
    kernel.load(kernel.all_saved())
    budget = int(share * kernel.evaluate(0).peak_bytes)
    assert kernel.repair(budget).peak_bytes <= budget


def test_the_branches_of_a_residual_block_are_recomputed_in_captured_order() -> None:
    """The skip is read last by the add but made first: recomputed after the other branch, it would meet its result."""
    b = Builder()
    x = b.add("input", [], MIB)
    skip = b.add("op", [b.add("op", [x], 4 * MIB, 1.0)], MIB, 1.0)
    branch = b.add("op", [x], MIB, 1.0)
    total = b.add("add", [branch, skip], MIB, 1.0)
    grad = b.add("tangent", [], 4, region="backward")
    grad = b.add("op_backward", [grad, total], MIB, 1.0, "backward")
    problem = reduce_program(b.build("residual", [], [grad]))
    kernel = Kernel(problem)
    kernel.load(State(np.zeros(problem.num_storages, dtype=np.uint8)))
    kernel.evaluate(0)
    assert [k for k in kernel.steps().kernels if k < problem.num_forward] == [0, 1, 2, 3]


def test_a_value_that_was_recomputed_and_used_up_is_not_held_for_a_later_decision() -> None:
    kernel = Kernel(reduce_program(blocks(8)))
    kernel.load(kernel.all_saved())
    peak = kernel.evaluate(0).peak_bytes
    assert kernel.repair(int(0.35 * peak)).peak_bytes <= 0.35 * peak


def test_many_users_of_every_value_are_no_trouble() -> None:  # pytorch#145081
    kernel = Kernel(reduce_program(many_users(32)))
    kernel.load(kernel.all_saved())
    budget = int(0.8 * kernel.evaluate(0).peak_bytes)
    kernel.evict(budget, 1.0, 0.5)
    kernel.repair(budget)
    kernel.polish(budget)
    assert kernel.effort.work < 300_000
