"""The planners: optimal where they claim it, valid everywhere, never faster than the proven bound."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bench.partition import fastest_by_enumeration
from fxmem.errors import BudgetInfeasible, OptionError, PlanMismatch
from fxmem.pipelining.bound import lower_bound_s
from fxmem.pipelining.chain import Chain, Cluster, Link
from fxmem.pipelining.evaluate import OneFOneBN
from fxmem.pipelining.partition.auto import Effort, plan_auto
from fxmem.pipelining.partition.base import Problem
from fxmem.pipelining.partition.mcap import mcap_cuts, predictions, profile_of, profile_runs, stage_aware_statistics
from fxmem.pipelining.partition.onefoneb_star import groups
from fxmem.pipelining.partition.periodic_ilp import PeriodicProgram, shortest_period, unroll
from fxmem.pipelining.partition.proposals import balanced, min_max
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.registry import PLANNERS, plan_pipeline
from fxmem.pipelining.schedules import verify_schedule
from fxmem.pipelining.simulate import StageCost, simulate
from fxmem.pipelining.synthetic import V100_LINK, amoebanet_like, gpt_like, vgg_like
from tests.pipelining.chains import random_chain

LINK = Link(0.05, 40.0)


def _all_cuts(length: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, length), num_stages - 1):
        yield (0, *inner, length)


def _vectors(num_stages: int, most: int) -> list[tuple[int, ...]]:
    return [v for v in itertools.product(range(1, most + 1), repeat=num_stages) if list(v) == sorted(v, reverse=True)]


def _budget(chain: Chain, num_devices: int, num: int, fraction: float) -> Cluster:
    roomy = Cluster(num_devices, 1e15, LINK)
    plan = plan_pipeline(chain, roomy, num, planner="time", recompute="none")
    return replace(roomy, memory_bytes=max(plan.peak_bytes) * fraction)


@pytest.mark.parametrize(("seed", "fraction"), [(s, f) for s in range(4) for f in (1.0, 0.7, 0.5)])
def test_auto_is_within_half_a_percent_of_brute_force(seed: int, fraction: float) -> None:
    chain = random_chain(seed, 9)
    problem = Problem(chain, _budget(chain, 3, 5, fraction), 5)
    best = fastest_by_enumeration(problem)
    try:
        plan = plan_auto(problem, schedules=("1f1b-n",))
    except BudgetInfeasible:
        assert best == np.inf
        return
    assert plan.step_s <= best * 1.005


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.8, 0.4])
@pytest.mark.parametrize("chain", [gpt_like(7), amoebanet_like(12, batch=16)], ids=lambda c: c.name)
def test_auto_against_brute_force_on_real_shapes(chain: Chain, fraction: float) -> None:
    roomy = Cluster(4, 1e15, V100_LINK)
    peak = max(plan_pipeline(chain, roomy, 8, planner="time", recompute="none").peak_bytes)
    problem = Problem(chain, replace(roomy, memory_bytes=peak * fraction), 8)
    assert plan_auto(problem, schedules=("1f1b-n",)).step_s <= fastest_by_enumeration(problem) * 1.005


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("recompute", ["optimal", "none"])
def test_every_plan_re_simulates_under_its_budget_and_above_the_bound(planner: str, recompute: str) -> None:
    made = 0
    for seed, fraction in itertools.product((1, 5), (1.1, 0.75, 0.5)):
        chain = random_chain(seed, 10)
        cluster = _budget(chain, 3, 6, fraction)
        options = {"num_iterations": 600} if planner == "memflow" else {}
        try:
            plan = plan_pipeline(chain, cluster, 6, planner=planner, recompute=recompute, **options)  # type: ignore[arg-type]
        except BudgetInfeasible:
            continue
        made += 1
        plan.verify(chain, cluster)
        verify_schedule(plan.schedule)
        assert max(plan.simulate(cluster, chain.input_bytes).peak_bytes) <= cluster.memory_bytes
        assert plan.bound_s <= plan.step_s
        assert plan.levels == (0,) * 10 or recompute == "optimal"
    assert made


@pytest.mark.parametrize("seed", range(8))
def test_bound_is_below_every_simulated_step(seed: int) -> None:
    """Over random cuts, counts and budgets: the bound of the same class never exceeds the simulation."""
    rng = random.Random(seed)
    chain = random_chain(seed + 50, 8)
    evaluated = 0
    for _ in range(12):
        cluster = _budget(chain, 3, 4, rng.uniform(0.4, 1.3))
        bound = lower_bound_s(chain, cluster, 4)
        split = lower_bound_s(chain, cluster, 4, split=True)
        assert split <= bound * (1 + 1e-9)
        evaluator = Problem(chain, cluster, 4).evaluator()
        for cuts in rng.sample(list(_all_cuts(8, 3)), 6):
            found = evaluator.evaluate(cuts, OneFOneBN(rng.choice(_vectors(3, 4)), 4))
            if found:
                evaluated += 1
                assert bound <= found.step_s
    assert evaluated > 5


@pytest.mark.parametrize("seed", range(10))
def test_min_max_is_optimal(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.uniform(0, 1, (7, 8))
    for num in (1, 2, 3, 4):
        cuts = min_max(cost, num)
        best = min(max(cost[i, j] for i, j in itertools.pairwise(c)) for c in _all_cuts(7, num))
        assert max(cost[i, j] for i, j in itertools.pairwise(cuts)) == best


def test_classic_partitioners_balance_what_they_say() -> None:
    chain = random_chain(7, 9)
    for name, column in (("time", "total_s"), ("parameters", "num_parameters")):
        weights = chain.columns[column]
        cuts = plan_pipeline(chain, Cluster(3, 1e9), 6, planner=name).cuts
        best = min(max(weights[i:j].sum() for i, j in itertools.pairwise(c)) for c in _all_cuts(9, 3))
        assert max(weights[i:j].sum() for i, j in itertools.pairwise(cuts)) == pytest.approx(best)
    assert [j - i for i, j in itertools.pairwise(plan_pipeline(chain, Cluster(3, 1e9), 6, planner="layers").cuts)] == [
        3
    ] * 3
    assert balanced(np.zeros(5), 5) == (0, 1, 2, 3, 4, 5)


def test_mcap_statistics_and_recommendation() -> None:
    chain = random_chain(3, 8)
    problem = Problem(chain, Cluster(3, 1e9), 6, "none")
    profile = profile_of(problem)
    for count in (1, 2, 3):
        iso, add = stage_aware_statistics(problem, count)
        assert iso == pytest.approx([profile(b, b + 1, count) for b in range(8)]), "linear in the in-flight count"
        assert predictions(iso, add)[2, 4] == pytest.approx(profile(2, 3, count) + add[3])
    tables = [predictions(*stage_aware_statistics(problem, n)) for n in (3, 2, 1)]

    def worst(cuts: tuple[int, ...]) -> float:
        return max(table[i, j] for table, (i, j) in zip(tables, itertools.pairwise(cuts), strict=True))

    assert worst(mcap_cuts(problem)) == pytest.approx(min(map(worst, _all_cuts(8, 3))))


@pytest.mark.parametrize(("layers", "devices"), [(8, 2), (6, 4), (10, 4), (12, 5), (24, 8)])
def test_mcaps_incremental_runs_isolate_every_layer(layers: int, devices: int) -> None:
    spans = set()
    for cuts in profile_runs(layers, devices):
        assert cuts[0] == 0
        assert cuts[-1] == layers
        assert len(cuts) - 1 <= devices
        assert list(cuts) == sorted(set(cuts))
        spans |= set(itertools.pairwise(cuts))
    assert devices == 2 or {(b, b + 1) for b in range(layers)} <= spans
    with pytest.raises(OptionError, match="incremental profiling"):
        list(profile_runs(2 * devices - 3, devices) if devices > 2 else profile_runs(1, devices))


def _costs(rng: random.Random, num: int) -> list[StageCost]:
    x = [0.0, *(rng.uniform(0, 4) for _ in range(num - 1)), 0.0]
    return [StageCost(rng.uniform(1, 3), rng.uniform(1, 5), 1, 1, 1, 10, x[s], x[s + 1], 10, 5) for s in range(num)]


@pytest.mark.parametrize("seed", range(8))
def test_1f1b_star_groups_are_minimal(seed: int) -> None:
    """Stage by stage, the integer program finds no periodic schedule of that period that keeps fewer, and one with
    these.
    """
    rng = random.Random(seed)
    num = rng.randint(2, 3)
    costs, cluster = _costs(rng, num), Cluster(num, 1e9)
    program = PeriodicProgram(costs, range(num), cluster)
    period = program.least_period_s() * rng.uniform(1.0, 1.6)
    counts = groups([cost.forward_s + cost.backward_s for cost in costs], [0.0] * (num - 1), period)
    for stage in range(num):
        fewest = program.solve(period, weigh_stage=stage)
        assert fewest is not None
        assert fewest.in_flight(stage) == counts[stage]


def test_periodic_schedules_reach_their_period_and_run() -> None:
    rng = random.Random(4)
    for _ in range(4):
        costs, cluster = _costs(rng, 3), Cluster(3, 1e9, Link(0.1, 8.0))
        program = PeriodicProgram(costs, range(3), cluster)
        periodic = shortest_period(program)
        assert periodic is not None
        assert periodic.period_s == pytest.approx(program.least_period_s())
        schedule = unroll(periodic, range(3), 12, "periodic")
        verify_schedule(schedule)
        longer = simulate(unroll(periodic, range(3), 20, "periodic"), costs, cluster)
        extra = longer.step_s - simulate(schedule, costs, cluster).step_s
        assert extra <= 8 * periodic.period_s * 1.01


@pytest.mark.parametrize("unit_s", [1e-8, 1e-6, 1.0])
def test_periodic_schedules_do_not_depend_on_the_unit_of_time(unit_s: float) -> None:
    """The solver's tolerances are absolute, a step may take microseconds: the bytes decide the same period."""
    rng = random.Random(2)
    costs = _costs(rng, 3)
    scaled = [c._replace(forward_s=c.forward_s * unit_s, backward_s=c.backward_s * unit_s) for c in costs]
    for memory in (29.0, 40.0, 60.0):
        expected, tiny = (
            shortest_period(PeriodicProgram(some, range(3), Cluster(3, memory, Link(unit * 0.1, 8.0 / unit))))
            for some, unit in ((costs, 1.0), (scaled, unit_s))
        )
        assert (expected is None) == (tiny is None)
        if expected is not None and tiny is not None:
            assert tiny.period_s == pytest.approx(expected.period_s * unit_s, rel=0.01)
            assert [tiny.in_flight(s) for s in range(3)] == [expected.in_flight(s) for s in range(3)]
            when = [t + tiny.period_s * h for t, h in zip(tiny.start_s, tiny.shift, strict=True)]
            for operation, begin, after in zip(tiny.operations, when, when[1:], strict=False):
                assert after >= begin + operation.seconds - 1e-3 * tiny.period_s


def test_memflow_finds_plans_where_no_search_without_recompute_does() -> None:
    chain, found = amoebanet_like(12, batch=16), 0
    roomy = Cluster(4, 1e15, V100_LINK)
    peak = max(plan_pipeline(chain, roomy, 8, planner="time", recompute="none").peak_bytes)
    cluster = replace(roomy, memory_bytes=peak * 0.2)
    for planner in ("auto", "layers", "parameters", "time", "mcap", "1f1b-star"):
        with pytest.raises(BudgetInfeasible):
            plan_pipeline(chain, cluster, 8, planner=planner, recompute="none")
        found += 1
    assert found == 6
    plan = plan_pipeline(chain, cluster, 8, planner="memflow", num_iterations=1500)
    plan.verify(chain, cluster)
    assert any(plan.levels)


@pytest.mark.slow
def test_auto_is_never_slower_than_the_named_planners() -> None:
    compared = 0
    for chain in (gpt_like(5), vgg_like(convs=(1, 2, 2, 2, 2)), amoebanet_like(9, batch=16)):
        peak = max(plan_pipeline(chain, Cluster(3, 1e15, V100_LINK), 6, planner="time", recompute="none").peak_bytes)
        for fraction in (1.1, 0.6):
            cluster = Cluster(3, peak * fraction, V100_LINK)
            auto = plan_pipeline(chain, cluster, 6)
            for planner in PLANNERS:
                options = {"num_iterations": 800} if planner == "memflow" else {}
                try:
                    other = plan_pipeline(chain, cluster, 6, planner=planner, **options)  # type: ignore[arg-type]
                except BudgetInfeasible:
                    continue
                compared += 1
                assert auto.step_s <= other.step_s * (1 + 1e-9), (chain.name, fraction, planner)
    assert compared > 30


def test_auto_chooses_the_number_of_microbatches() -> None:
    chain = gpt_like(4)
    cluster = Cluster(3, 64 * 2**30, V100_LINK)
    coarse = plan_pipeline(chain, cluster, 3, schedules=("1f1b-n",))
    best = plan_pipeline(chain, cluster, 3, schedules=("1f1b-n",), microbatch_choices=(3, 6, 12))
    assert best.num_microbatches > 3
    assert best.step_s < coarse.step_s
    best.verify(replace(chain, num_microbatches=3).scaled_to(best.num_microbatches), cluster)


def test_infeasible_names_the_stage_and_a_budget_that_works() -> None:
    chain = random_chain(6, 8)
    with pytest.raises(BudgetInfeasible, match=r"device \d of 3") as caught:
        plan_pipeline(chain, Cluster(3, 10.0, LINK), 4)
    error = caught.value
    assert any("stage" in name and nbytes > 0 for name, nbytes in error.at_peak)
    plan_pipeline(chain, Cluster(3, float(error.min_bytes), LINK), 4)


def test_bad_requests_are_refused() -> None:
    chain = random_chain(6, 3)
    with pytest.raises(OptionError, match="too few"):
        plan_pipeline(chain, Cluster(4, 1e9), 4)
    with pytest.raises(OptionError, match="expected one of auto"):
        plan_pipeline(chain, Cluster(2, 1e9), 4, planner="nope")
    with pytest.raises(OptionError, match="1f1b-n"):
        plan_pipeline(chain, Cluster(2, 1e9), 4, schedules=("nope",))


def test_plan_json_round_trip_and_verification() -> None:
    chain, cluster = random_chain(9, 8), Cluster(3, 1e6, LINK)
    plan = plan_pipeline(chain, cluster, 4, effort=Effort(num_starts=1, max_tries=50))
    again = PipelinePlan.from_json(plan.to_json())
    assert again == plan
    assert "stage 0: blocks 0.." in str(plan)
    with pytest.raises(PlanMismatch, match="the chain has 7"):
        plan.verify(random_chain(9, 7), cluster)
