"""Keep, recompute or offload: against the simulator, an independent oracle, brute force, bounds and other planners."""

import contextlib
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from bench.offload import machine, margins, run
from fxmem.errors import BudgetInfeasible, OptionError, VerifyError
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.kernel.binding import State
from fxmem.planners.kernel.joint import KEEP, OFFLOAD, JointKernel, offloadable
from fxmem.planners.offload.bound import OffloadBound
from fxmem.planners.offload.search import JointPool
from fxmem.planners.plan import judge, make_plan
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.recompute.bound import free_lunch_s
from fxmem.planners.recompute.replay import state_of
from fxmem.planners.registry import Solution, get_planner
from fxmem.schedule import Machine, simulate
from fxmem.schedule.actions import Offload
from fxmem.schedule.simulate import Link
from fxmem.testing import Shape, oracle_peak_bytes, programs
from tests.planners.models import MIB, Builder, blocks
from tests.planners.test_instances import load

SMALL = Shape(num_forward=(2, 5))
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)


def host(bytes_per_s: float, latency_s: float = 0.0) -> Options:
    return Options(
        solve_s=0.15, tiers=("host",), machine=Machine({"host": Link(bytes_per_s, bytes_per_s / 2, latency_s)})
    )


def joint(problem: Problem, options: Options) -> JointKernel:
    return JointKernel(problem, options.machine.links["host"], offloadable(problem, options.pinned))


def unplanned_bytes(problem: Problem) -> int:
    return simulate(problem.program, problem.actions(range(problem.num_kernels), problem.num_forward)).peak_bytes


@st.composite
def states(draw: st.DrawFn, problem: Problem) -> State:
    """Any decisions, sensible or not."""
    saved = draw(st.lists(st.integers(0, 2), min_size=problem.num_storages, max_size=problem.num_storages))
    reads = [(k, int(s)) for k in range(problem.num_forward, problem.num_kernels) for s in problem.reads(k)]
    drops = draw(st.sets(st.sampled_from(reads))) if reads else set()
    return State(np.array(saved, dtype=np.uint8), tuple(sorted(drops)))


@settings(max_examples=100)
@given(st.data(), programs(), st.floats(0.3, 1.1), st.sampled_from([0.5, 8.0, 100.0]), st.sampled_from([0.0, 0.5]))
def test_what_is_believed_is_what_the_simulator_finds(
    data: st.DataObject, program: Program, share: float, pace: float, latency_s: float
) -> None:
    problem, options = reduce_program(program), host(pace, latency_s)
    kernel = joint(problem, options)
    budget = max(1, int(share * unplanned_bytes(problem)))
    state = data.draw(states(problem))
    kernel.load(state)
    score = kernel.evaluate(budget)
    actions = kernel.actions(state, budget, "host")
    result = simulate(program, actions, options.machine)
    assert result.seconds == pytest.approx(problem.baseline_s + score.extra_s)
    assert result.bytes_moved == score.moved_bytes
    assert score.peak_bytes <= result.peak_bytes <= max(budget, score.peak_bytes)
    assert result.peak_bytes == oracle_peak_bytes(program, actions)


@settings(max_examples=60)
@given(st.data(), programs(), st.floats(0.4, 1.0), st.floats(1.0, 10.0))
def test_a_faster_link_never_slows_a_fixed_schedule(
    data: st.DataObject, program: Program, share: float, faster: float
) -> None:
    problem = reduce_program(program)
    kernel = joint(problem, host(4.0))
    budget = max(1, int(share * unplanned_bytes(problem)))
    actions = kernel.actions(data.draw(states(problem)), budget, "host")
    slow = simulate(program, actions, host(4.0).machine)
    fast = simulate(program, actions, host(4.0 * faster).machine)
    assert fast.seconds <= slow.seconds + 1e-9
    assert fast.peak_bytes == slow.peak_bytes


def brute_extra_s(kernel: JointKernel, budget: int) -> float:
    """Least extra seconds over every three-way state without drops."""
    open_storages = np.flatnonzero(kernel.cand | kernel.can)
    best = math.inf
    for choice in itertools.product((0, KEEP, OFFLOAD), repeat=len(open_storages)):
        saved = np.ones(kernel.problem.num_storages, dtype=np.uint8)
        saved[open_storages] = choice
        kernel.load(State(saved))
        score = kernel.evaluate(budget)
        if score.peak_bytes <= budget:
            best = min(best, score.extra_s)
    return best


@settings(max_examples=20, phases=NO_SHRINK)
@given(programs(SMALL), st.floats(0.4, 1.0), st.sampled_from([2.0, 10.0]))
def test_brute_force_over_all_states_is_matched_and_the_bound_is_below(
    program: Program, share: float, pace: float
) -> None:
    problem, options = reduce_program(program), host(pace)
    budget = max(1, int(share * unplanned_bytes(problem)))
    brute = brute_extra_s(joint(problem, options), budget)
    try:
        plan = make_plan(program, budget, "auto", options)
    except BudgetInfeasible:
        assert brute == math.inf
        return
    assert plan.peak_bytes <= budget
    assert plan.extra_s <= brute + 1e-6
    assert plan.lower_bound_s <= plan.extra_s + 1e-4 * (1 + plan.baseline_s)


@settings(max_examples=30, phases=NO_SHRINK)
@given(programs(SMALL), st.floats(0.4, 0.95), st.sampled_from([1.0, 5.0]))
def test_the_bound_is_below_every_state(program: Program, share: float, pace: float) -> None:
    problem = reduce_program(program)
    kernel = joint(problem, host(pace))
    budget = max(1, int(share * unplanned_bytes(problem)))
    bound = OffloadBound(kernel, kernel.link, budget, -free_lunch_s(problem))
    while len(bound.moments) < 3 and bound.step(math.inf, integral=True):
        pass
    assert bound.seconds <= brute_extra_s(kernel, budget) + 1e-4 * (1 + problem.baseline_s)


@settings(max_examples=15, phases=NO_SHRINK)
@given(programs(), st.floats(0.5, 0.9), st.sampled_from([1.0, 10.0]))
def test_a_tier_never_costs_time(program: Program, share: float, pace: float) -> None:
    budget = max(1, int(share * unplanned_bytes(reduce_program(program))))
    try:
        without = make_plan(program, budget, "auto", Options(solve_s=0.15))
    except BudgetInfeasible:
        return
    assert make_plan(program, budget, "auto", host(pace)).extra_s <= without.extra_s + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"),
    [("resnet50_hf", 0.2), ("resnet50_hf", 0.55), ("resnet50_hf", 0.7), ("unet", 0.35), ("gpt2_6l", 0.4)],
)
def test_a_slow_tier_costs_neither_time_nor_bytes_on_captured_graphs(name: str, share: float) -> None:
    """To the last digit, however little time there is: work is counted, so both searches find the same."""
    program = load(name)
    links = machine(reduce_program(program), 16.0)

    def found(options: Options) -> tuple[float, int]:
        try:
            return make_plan(program, share, "auto", options).extra_s, 0
        except BudgetInfeasible as error:
            return math.inf, error.min_bytes

    (extra_s, least), (with_s, with_least) = (
        found(Options(solve_s=0.1, tiers=tiers, machine=links)) for tiers in ((), ("host",))
    )
    assert with_s <= extra_s + 1e-8 * sum(op.seconds for op in program.ops)
    assert with_least <= least


OTHERS = ("offload-all", "offload-greedy", "offload-dp", "revolve", "disk-revolve", "rotor", "pofo")


@pytest.mark.parametrize("pace", [MIB / 2, 2 * MIB, 8 * MIB])
def test_no_other_planner_does_better(pace: float) -> None:
    program, options = blocks(6), replace(host(pace), solve_s=1.0)
    best = make_plan(program, 0.6, "auto", options).extra_s
    for planner in OTHERS:
        try:
            assert best <= make_plan(program, 0.6, planner, options).extra_s + 1e-6
        except BudgetInfeasible:
            continue


def assert_none_is_faster(program: Program, budget: int, options: Options, names: tuple[str, ...] = OTHERS) -> None:
    """`auto` adds no more seconds than any of `names` under the same options, and fits where one does."""
    found = []
    for planner in names:
        with contextlib.suppress(BudgetInfeasible):
            found.append((make_plan(program, budget, planner, options).extra_s, planner))
    if found:
        mine = make_plan(program, budget, "auto", options)
        assert mine.extra_s <= min(found)[0] + 1e-8 * mine.baseline_s, min(found)


@settings(max_examples=15, phases=NO_SHRINK)
@given(programs(), st.floats(0.5, 0.95), st.sampled_from([1.0, 10.0]))
def test_no_time_is_no_excuse(program: Program, share: float, pace: float) -> None:
    budget = max(1, int(share * unplanned_bytes(reduce_program(program))))
    assert_none_is_faster(program, budget, replace(host(pace), solve_s=1e-3))


@pytest.mark.parametrize("num_blocks", [6, 12])
@pytest.mark.parametrize("pace", [2 * MIB, 8 * MIB])
def test_no_time_is_no_excuse_on_blocks(num_blocks: int, pace: float) -> None:
    assert_none_is_faster(
        blocks(num_blocks),
        int(0.6 * unplanned_bytes(reduce_program(blocks(num_blocks)))),
        replace(host(pace), solve_s=1e-3),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share", "rho"), [("gpt2_6l", 0.7, 0.25), ("unet", 0.6, 4.0), ("resnet50_hf", 0.8, 1.0)]
)
def test_little_time_is_no_excuse_on_captured_graphs(name: str, share: float, rho: float) -> None:
    program = load(name)
    problem = reduce_program(program)
    options = Options(solve_s=0.1, tiers=("host",), machine=machine(problem, rho))
    assert_none_is_faster(program, int(share * unplanned_bytes(problem)), options)


@settings(max_examples=15, phases=NO_SHRINK)
@given(programs(), st.floats(0.5, 0.95), st.sampled_from([1.0, 10.0]))
def test_what_chain_planners_find_is_a_state(program: Program, share: float, pace: float) -> None:
    """Replayed as decisions it is no slower, where it fits; with recomputation alone it is the same schedule."""
    problem, options = reduce_program(program), host(pace)
    kernel, budget = joint(problem, options), max(1, int(share * unplanned_bytes(problem)))
    for planner in ("rotor", "revolve", "offload-all"):
        try:
            actions = get_planner(planner)(problem, budget, options).actions
        except BudgetInfeasible:
            continue
        kernel.load(state_of(problem, actions))
        score, found = kernel.evaluate(budget), simulate(program, actions, options.machine)
        if score.peak_bytes <= budget:
            assert problem.baseline_s + score.extra_s <= found.seconds + 1e-9


def test_another_planners_plan_is_taken_where_the_search_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    program, options = unrecomputable(), replace(host(4 * MIB), solve_s=0.05)
    good = make_plan(program, 0.6, "auto", replace(options, solve_s=1.0))
    monkeypatch.setattr(JointPool, "improve", lambda *_, **__: None)
    monkeypatch.setattr("fxmem.planners.offload.search.chain_solutions", lambda *_: iter([Solution(good.actions)]))
    assert make_plan(program, 0.6, "auto", options).extra_s <= good.extra_s
    monkeypatch.setattr("fxmem.planners.offload.search.chain_solutions", lambda *_: iter([]))
    with pytest.raises(BudgetInfeasible):
        make_plan(program, 0.6, "auto", options)


@pytest.mark.parametrize("planner", ["auto", "offload-all", "offload-dp"])
def test_a_tier_holds_no_more_than_it_can(planner: str) -> None:
    program, options = blocks(6), host(64 * MIB)
    free = make_plan(program, 0.8, planner, options)
    capacity = free.simulation.tier_peak_bytes["host"] // 2
    small = replace(options, machine=replace(options.machine, capacity_bytes={"host": capacity}))
    plan = make_plan(program, 0.9, planner, small)
    assert 0 < plan.simulation.tier_peak_bytes["host"] <= capacity
    with pytest.raises(VerifyError, match="host tier"):
        judge(program, free.actions, planner, None, small.machine)


def test_what_a_full_tier_can_not_take_needs_a_larger_budget() -> None:
    program, options = unrecomputable(), host(64 * MIB)
    least = make_plan(program, "min", "auto", options)
    small = replace(options, machine=replace(options.machine, capacity_bytes={"host": 2 * MIB}))
    with pytest.raises(BudgetInfeasible) as caught:
        make_plan(program, least.peak_bytes, "auto", small)
    plan = make_plan(program, caught.value.min_bytes, "auto", small)
    assert plan.simulation.tier_peak_bytes["host"] <= 2 * MIB


def test_margins_name_the_best_other_planner() -> None:
    rows = [
        {"instance": "a", "budget_fraction": 0.5, "rho": 1.0, "planner": name, "feasible": extra is not None}
        | {"extra_pct": extra, "bound_pct": 0.0, "solve_s": 1.0}
        for name, extra in (("auto", 2.0), ("rotor", 5.0), ("pofo", 1.5), ("revolve", None))
    ]
    (cell,) = margins(rows)
    assert (cell["best_other"], cell["margin_pct"]) == ("pofo", -0.5)
    (cell,) = margins([rows[0], rows[3]])
    assert cell["margin_pct"] is None
    (cell,) = margins([rows[0] | {"feasible": False}, rows[1]])
    assert cell["margin_pct"] == -math.inf


def test_a_fast_link_makes_a_tight_budget_free() -> None:
    plan = make_plan(blocks(12), 0.4, "auto", host(1000 * MIB))
    assert plan.extra_s <= 1e-3 * plan.baseline_s
    assert make_plan(blocks(12), 0.4, "auto", Options(solve_s=0.15)).extra_s > 0.05 * plan.baseline_s


def test_a_hopeless_link_is_not_used() -> None:
    plan = make_plan(blocks(6), 0.6, "auto", replace(host(1.0), solve_s=1.5))
    assert not any(isinstance(action, Offload) for action in plan.actions)
    assert plan.lower_bound_s > 0


def test_everything_fits_moves_nothing() -> None:
    plan = make_plan(blocks(4), 1.0, "auto", host(MIB))
    assert plan.extra_s == 0
    assert plan.simulation.bytes_moved == 0


def test_pinned_storages_stay() -> None:
    program, options = blocks(6), host(64 * MIB)
    moved = {a.storage for a in make_plan(program, 0.5, "auto", options).actions if isinstance(a, Offload)}
    assert moved
    pinned = replace(options, pinned=frozenset(moved))
    again = {a.storage for a in make_plan(program, 0.5, "auto", pinned).actions if isinstance(a, Offload)}
    assert again.isdisjoint(moved)


def test_a_tier_that_the_machine_lacks_is_refused() -> None:
    with pytest.raises(OptionError, match="disk"):
        make_plan(blocks(2), 0.9, "auto", Options(tiers=("disk",), machine=host(1.0).machine))


def test_the_fastest_tier_is_taken() -> None:
    links = Machine({"disk": Link(MIB, MIB), "host": Link(64 * MIB, 64 * MIB)})
    plan = make_plan(blocks(6), 0.5, "auto", Options(solve_s=0.15, tiers=("disk", "host"), machine=links))
    assert {a.tier for a in plan.actions if isinstance(a, Offload)} == {"host"}


def unrecomputable() -> Program:
    """A chain of random ops, which may not run twice: only offloading helps."""
    b = Builder()
    made = [b.add("input", [], 4)]
    for _ in range(8):
        made.append(b.add("dropout", [made[-1]], MIB, 1.0))
    grad = b.add("tangent", [], 4, region="backward")
    for x in reversed(made[1:]):
        grad = b.add("dropout_backward", [grad, x], MIB, 1.0, "backward")
    return b.build("dropouts", [made[-1]], [grad])


def test_min_goes_below_what_recompute_reaches_and_is_feasible() -> None:
    program, options = unrecomputable(), host(4 * MIB)
    alone = make_plan(program, "min", "auto", Options(solve_s=0.15))
    least = make_plan(program, "min", "auto", options)
    assert least.peak_bytes < 0.6 * alone.peak_bytes
    with pytest.raises(BudgetInfeasible) as caught:
        make_plan(program, least.peak_bytes - MIB, "auto", options)
    assert caught.value.at_peak
    assert make_plan(program, caught.value.min_bytes, "auto", options).peak_bytes <= caught.value.min_bytes


def test_search_ends_in_what_it_promises() -> None:
    problem, options = reduce_program(blocks(8)), host(2 * MIB)
    kernel = joint(problem, options)
    budget = int(0.5 * unplanned_bytes(problem))
    pool = JointPool(kernel, budget, 0.0)
    pool.improve(kernel.all_saved(), 0.0)
    before = pool.best_s
    assert pool.best is not None
    kernel.load(pool.best)
    score = kernel.perturb(budget, 0.1)
    assert score.extra_s <= before + 1e-9
    assert score.peak_bytes <= budget
    kernel.load(kernel.store())
    assert kernel.evaluate(budget) == score


def test_bench_row_has_every_column() -> None:
    row = run(blocks(3), 0.7, 1.0, "auto", Options(solve_s=0.1))
    names = "instance budget_fraction rho planner peak_bytes extra_pct stall_pct bytes_moved bound_pct solve_s feasible"
    assert list(row) == names.split()
    alone = run(blocks(3), 0.7, 1.0, "recompute", Options(solve_s=0.1))
    assert row["bound_pct"] <= row["extra_pct"] <= alone["extra_pct"] + 1e-6
    assert alone["bytes_moved"] == 0
