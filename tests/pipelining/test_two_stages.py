"""Schedules with two stages a device: cuts for them, and the bound that holds for stages anywhere."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from fxmem.pipelining.bound import lower_bound_s
from fxmem.pipelining.chain import Cluster, Link
from fxmem.pipelining.evaluate import Evaluator, FixedSchedule
from fxmem.pipelining.partition.auto import TWO_STAGES, plan_auto
from fxmem.pipelining.partition.base import Problem
from fxmem.pipelining.partition.fixed import leaner, search_cuts, starts_for
from fxmem.pipelining.partition.proposals import balanced, least_squares
from fxmem.pipelining.schedules import torch_schedule
from fxmem.pipelining.synthetic import V100_LINK, gpt_like
from tests.pipelining.chains import random_chain

LINK = Link(0.05, 40.0)


@pytest.mark.parametrize("name", TWO_STAGES)
def test_the_bound_is_below_every_simulated_step(name: str) -> None:
    """Over random cuts and budgets, tight ones included."""
    rng, evaluated = random.Random(name), 0
    maker = FixedSchedule(torch_schedule(name, 2, 6, 2))
    for seed in range(12):
        chain = random_chain(seed + 200, 9)
        roomy = Cluster(2, 1e15, LINK)
        cuts = tuple(sorted(rng.sample(range(1, 9), 3)))
        free = Evaluator(chain, roomy).evaluate((0, *cuts, 9), maker)
        assert free is not None
        for fraction in (1.0, 0.8, 0.65, 0.5):
            cluster = replace(roomy, memory_bytes=max(free.peak_bytes) * fraction)
            found = Evaluator(chain, cluster).evaluate((0, *cuts, 9), maker)
            if found:
                evaluated += 1
                bound = lower_bound_s(chain, cluster, 6, interleaved=True)
                assert bound <= found.step_s
    assert evaluated > 12


def test_the_bound_counts_the_bytes() -> None:
    chain = gpt_like(12)
    static = float(chain.columns["static_bytes"].sum()) / 4
    bounds = [
        lower_bound_s(chain, Cluster(4, static + more, V100_LINK), 16, interleaved=True) for more in (1e12, 1e9, 5e8)
    ]
    assert bounds[0] < bounds[1] < bounds[2]
    assert bounds[0] == pytest.approx(4 * chain.columns["total_s"].sum())
    assert lower_bound_s(chain, Cluster(4, static, V100_LINK), 16, interleaved=True) == np.inf


@pytest.mark.parametrize("seed", range(6))
def test_least_squares_is_optimal(seed: int) -> None:
    cost = np.random.default_rng(seed).uniform(0, 1, (7, 8))
    for num in (1, 2, 3, 4):
        cuts = least_squares(cost, num)
        every = ((0, *inner, 7) for inner in itertools.combinations(range(1, 7), num - 1))
        best = min(sum(cost[i, j] ** 2 for i, j in itertools.pairwise(c)) for c in every)
        assert sum(cost[i, j] ** 2 for i, j in itertools.pairwise(cuts)) == pytest.approx(best)


def test_cuts_that_do_not_fit_are_made_leaner() -> None:
    """A budget under which no start fits, but a shift of their cuts does."""
    made = 0
    maker = FixedSchedule(torch_schedule("interleaved", 3, 6, 2))
    for seed in range(30):
        chain = random_chain(seed, 14)
        start = balanced(chain.columns["total_s"], 6)
        roomy = Evaluator(chain, Cluster(3, 1e15, LINK))
        needs = [float(device.need.min()) for device in roomy.devices(start, maker)]
        cluster = Cluster(3, max(needs) * 0.97, LINK)
        evaluator = Evaluator(chain, cluster)
        shifted = leaner(evaluator, start, maker)
        made += evaluator.evaluate(start, maker) is None and evaluator.evaluate(shifted, maker) is not None
    assert made > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_STAGES)
def test_auto_takes_two_stages_where_they_are_faster(name: str) -> None:
    """Few microbatches and bytes to spare: half the bubble. `auto` allowed all is at least as fast as allowed one."""
    chain = gpt_like(12, vocab=4000)
    problem = Problem(chain, Cluster(4, 1e12, V100_LINK), 8)
    one = plan_auto(problem, schedules=(name,))
    assert one.schedule.name == name
    assert one.schedule.num_stages == 8
    assert one.step_s < plan_auto(problem, schedules=("1f1b-n",)).step_s
    assert plan_auto(problem).step_s <= one.step_s * (1 + 1e-9)
    one.verify(chain, problem.cluster)


def test_search_for_a_fixed_schedule_beats_its_starts() -> None:
    chain = random_chain(31, 20)
    problem = Problem(chain, Cluster(3, 1e9, LINK), 6)
    evaluator, maker = problem.evaluator(), FixedSchedule(torch_schedule("interleaved", 3, 6, 2))
    starts = starts_for(problem, evaluator, maker.schedule)
    steps = [found.step_s for cuts in starts if (found := evaluator.evaluate(cuts, maker))]
    best = search_cuts(evaluator, maker, starts, 500)
    assert best is not None
    assert best.step_s < min(steps)
