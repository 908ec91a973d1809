"""Every planner against brute force, bounds, budgets and each other."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import fxmem
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Op, Program, Storage
from fxmem.planners import Options, get_planner
from fxmem.planners.kernel.binding import Kernel, candidates
from fxmem.planners.plan import Plan, make_plan
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.recompute.blocks import storage_classes
from fxmem.planners.recompute.bound import LowerBound, least_bytes
from fxmem.planners.recompute.mincut import CutFamily
from fxmem.planners.recompute.search import Pool, quick
from fxmem.schedule import Compute, Recompute, StartBackward, simulate
from fxmem.testing import Shape, programs, zoo
from tests.planners.brute import least_extra_s
from tests.planners.models import blocks, products

FAST = Options(solve_s=0.3)
SMALL = Shape(num_forward=(2, 6))


def unplanned_bytes(problem: Problem) -> int:
    kernel = Kernel(problem)
    kernel.load(kernel.all_saved())
    return kernel.evaluate(0).peak_bytes


def extra_s(program: Program, budget: int, planner: str) -> tuple[float, float, bool]:
    """(extra seconds, lower bound, proven optimal) of a planner; inf when it finds nothing."""
    problem = reduce_program(program)
    try:
        solution = get_planner(planner)(problem, budget, FAST)
    except BudgetInfeasible:
        return math.inf, 0.0, False
    result = simulate(program, solution.actions)
    assert result.peak_bytes <= budget
    return result.seconds - problem.baseline_s, solution.lower_bound_s, bool(solution.notes.get("optimal"))


@settings(max_examples=40)
@given(programs(SMALL), st.floats(0.3, 1.0))
def test_brute_force_is_never_beaten_and_never_below_the_bound(program: Program, share: float) -> None:
    problem = reduce_program(program)
    budget = int(share * unplanned_bytes(problem))
    optimum = least_extra_s(problem, budget)
    for planner in ("exact", "auto"):
        found, bound, proven = extra_s(program, budget, planner)
        assert found >= optimum - 1e-6
        assert bound <= optimum + 1e-4
        if proven:
            assert found == pytest.approx(optimum, abs=1e-3 * problem.baseline_s + 1e-9)
    if optimum < math.inf:
        assert budget >= least_bytes(problem)


def test_exact_and_auto_reach_brute_force_on_nearly_all_small_problems() -> None:
    hits, tried = {"exact": 0, "auto": 0}, 0
    for seed in range(25):
        program = _drawn(seed)
        problem = reduce_program(program)
        budget = int(0.75 * unplanned_bytes(problem))
        optimum = least_extra_s(problem, budget)
        tried += 1
        for planner in hits:
            found, _, _ = extra_s(program, budget, planner)
            hits[planner] += found <= optimum + 1e-6 or optimum == math.inf
    assert hits["exact"] >= 0.95 * tried
    assert hits["auto"] >= 0.95 * tried


def _drawn(seed: int) -> Program:
    """A small random chain with skips: forward ops read the previous value and one other, backward likewise."""
    from tests.planners.models import Builder

    rng = np.random.default_rng(seed)
    b = Builder()
    made = [b.add("input", [], 1)]
    for _ in range(int(rng.integers(3, 6))):
        args = [made[-1], made[int(rng.integers(len(made)))]]
        made.append(b.add("op", args, int(rng.integers(1, 50)), float(rng.integers(1, 9))))
    grad = b.add("tangent", [], 1, region="backward")
    for i in range(len(made) - 1, 0, -1):
        args = [grad, made[i - 1], made[int(rng.integers(i + 1))]]
        grad = b.add("op_backward", args, int(rng.integers(1, 20)), 1.0, "backward")
    return b.build(f"drawn {seed}", [made[-1]], [grad])


@settings(max_examples=25, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # each takes too long to shrink
@given(programs(), st.sampled_from(["none", "full", "sqrt", "auto", "exact"]), st.floats(0.3, 1.2))
def test_a_planner_fits_or_names_a_budget_that_does(program: Program, planner: str, share: float) -> None:
    budget = max(1, int(share * unplanned_bytes(reduce_program(program))))
    plan, refusal = _attempt(program, budget, planner)
    if plan is not None:
        assert plan.peak_bytes <= budget
        assert plan.lower_bound_s <= plan.extra_s + 1e-6
    if refusal is not None:
        assert refusal.min_bytes > budget
        assert refusal.at_peak
        assert make_plan(program, refusal.min_bytes, planner, FAST).peak_bytes <= refusal.min_bytes


def _attempt(program: Program, budget: int, planner: str) -> tuple[Plan | None, BudgetInfeasible | None]:
    try:
        return make_plan(program, budget, planner, FAST), None
    except BudgetInfeasible as error:
        return None, error


def test_everything_fits_costs_nothing() -> None:
    plan = make_plan(blocks(4), 1.0, "auto", FAST)
    assert plan.extra_s == 0
    assert plan.peak_bytes == plan.baseline_peak_bytes


def test_budget_sweep_is_monotone() -> None:  # pytorch#197838
    program = blocks(12)
    extras = [
        make_plan(program, share, "auto", Options(solve_s=1.0)).extra_s for share in (0.3, 0.4, 0.55, 0.7, 0.85, 1.0)
    ]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(extras))
    assert extras[0] > extras[-1] == 0


def test_a_nearly_full_budget_costs_nearly_nothing() -> None:  # pytorch#149258
    plan = make_plan(blocks(32), 0.99, "auto", Options(solve_s=1.0))
    assert plan.extra_s <= 0.005 * plan.baseline_s


def test_products_match_brute_force_at_every_budget() -> None:  # pytorch#130039
    program = products()
    problem = reduce_program(program)
    peak, least = unplanned_bytes(problem), least_bytes(problem)
    for budget in range(least, peak + 1, max(1, (peak - least) // 5)):
        optimum = least_extra_s(problem, budget)
        assert extra_s(program, budget, "auto")[0] == pytest.approx(optimum)
        assert extra_s(program, budget, "exact")[0] == pytest.approx(optimum)


def test_recomputing_everything_is_no_cure() -> None:
    program = blocks(12)
    problem = reduce_program(program)
    with pytest.raises(BudgetInfeasible) as caught:
        make_plan(program, 0.5, "full", FAST)
    assert caught.value.min_bytes > 0.5 * unplanned_bytes(problem)
    assert make_plan(program, 0.5, "auto", FAST).extra_s < 0.3 * problem.baseline_s


def test_sqrt_needs_about_the_root_of_the_memory() -> None:
    plan = make_plan(blocks(25), "min", "sqrt", FAST)
    assert plan.peak_bytes < 0.6 * plan.baseline_peak_bytes
    assert 0.1 < plan.extra_s / plan.baseline_s < 0.4


def test_min_is_certified_on_regular_blocks() -> None:
    program = blocks(12)
    plan = make_plan(program, "min", "auto", Options(solve_s=0.5))
    assert least_bytes(reduce_program(program)) <= plan.peak_bytes <= 1.25 * least_bytes(reduce_program(program))


def test_work_grows_about_linearly_with_identical_blocks() -> None:  # ColossalAI#2853
    per_kernel = []
    for num_blocks in (4, 12, 24, 48):
        problem = reduce_program(blocks(num_blocks))
        kernel = Kernel(problem)
        kernel.share(storage_classes(problem))
        peak = unplanned_bytes(problem)
        pool = Pool(kernel, int(0.5 * peak), peak)
        quick(pool, CutFamily(kernel), math.inf)
        assert pool.best is not None
        per_kernel.append(kernel.effort.work / problem.num_kernels)
    assert per_kernel[3] <= 3 * per_kernel[1]  # quadratic would be 4 times
    assert per_kernel[3] <= 2 * per_kernel[2] * 1.2


def test_identical_blocks_fall_into_few_classes() -> None:
    few, many = (len(np.unique(storage_classes(reduce_program(blocks(n))))) for n in (12, 48))
    assert many == few


def test_sharing_between_blocks_costs_little() -> None:
    problem = reduce_program(blocks(24))
    peak = unplanned_bytes(problem)
    found = []
    for shared in (False, True):
        kernel = Kernel(problem)
        if shared:
            kernel.share(storage_classes(problem))
        pool = Pool(kernel, int(0.5 * peak), peak)
        quick(pool, CutFamily(kernel), math.inf)
        found.append(pool.best_s)
    assert found[1] <= found[0] + 0.005 * problem.baseline_s


def test_bound_grows_with_moments_and_shrinks_with_the_budget() -> None:
    problem = reduce_program(blocks(6))
    peak = unplanned_bytes(problem)
    bounds = []
    for share in (0.8, 0.6, 0.45):
        bound = LowerBound(problem, candidates(problem), int(share * peak))
        before = 0.0
        for _ in range(3):
            bound.step(math.inf)
            assert bound.seconds >= before
            before = bound.seconds
        bounds.append(bound.seconds)
    assert bounds == sorted(bounds)
    assert bounds[-1] > bounds[0] > 0


def test_many_equal_values_are_not_too_small_to_decide_about() -> None:
    """One of a thousand is a thousandth; the layers of a recurrent network are all of what it saves."""
    problem = reduce_program(blocks(300))
    equal = replace(problem, nbytes=np.full_like(problem.nbytes, 8192))
    assert problem.num_storages > 1000
    assert candidates(equal).sum() >= candidates(problem).sum() > 500


def test_random_values_are_saved_never_drawn_again() -> None:
    program = _with_dropout()
    plan = make_plan(program, "min", "auto", FAST)
    runs = [a.op for a in plan.actions if hasattr(a, "op") and program.ops[a.op].target == "dropout"]
    assert len(runs) == len(set(runs))


def _with_dropout() -> Program:
    from tests.planners.models import MIB, Builder

    b = Builder()
    x = b.add("input", [], MIB)
    made = []
    for target in ("linear", "dropout", "gelu") * 4:
        made.append((target, x, b.add(target, [x], MIB, 1.0)))
        x = made[-1][2]
    grad = b.add("tangent", [], MIB, region="backward")
    for target, read, out in reversed(made):
        grad = b.add(f"{target}_backward", [grad, out if target == "dropout" else read], MIB, 1.0, "backward")
    return b.build("dropout", [x], [grad])


@pytest.mark.slow
def test_bound_of_a_step_that_takes_microseconds() -> None:
    """The solver's tolerances are absolute: in seconds, they were as large as the extra time of a tiny step."""
    program = fxmem.plan(*zoo.build("bert", "tiny"), budget=None).program
    draw = random.Random(1)
    timed = tuple(replace(op, seconds=draw.uniform(2e-6, 3e-5) if op.seconds else 0.0) for op in program.ops)
    plan = make_plan(replace(program, ops=timed), 0.92)
    assert 0 < plan.lower_bound_s <= plan.extra_s


@pytest.mark.parametrize("planner", ["auto", "exact", "full"])
def test_a_draw_that_only_backward_reads_is_drawn_in_forward(planner):
    ops = (
        Op(0, "x", "input", "forward", (), (0,), is_input=True, recomputable=False),
        Op(1, "state", "state", "forward", (), (1,), is_random=True, recomputable=False),
        Op(2, "draw", "draw", "forward", (0, 1), (2,), seconds=1.0, is_random=True),
        Op(3, "h", "cos", "forward", (0,), (3,), seconds=1.0),
        Op(4, "loss", "sum", "forward", (3,), (4,), seconds=1.0),
        Op(5, "g", "mul", "backward", (3, 4), (5,), seconds=1.0),
        Op(6, "gg", "mul", "backward", (2, 5), (6,), seconds=1.0),
    )
    sizes = (8, 5, 1000, 1000, 1, 8, 8)
    program = Program("draws", ops, tuple(Storage(i, n) for i, n in enumerate(sizes)), (4,), (6,), (0,))
    plan = make_plan(program, "min", planner)
    boundary = plan.actions.index(StartBackward())
    assert Compute(2) in plan.actions[:boundary]
    assert Recompute(2) in plan.actions[boundary:]
    assert Compute(1) in plan.actions[: plan.actions.index(Compute(2))]
