"""Planning counts its work: a slow or busy machine gets the same plan, later."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from bench.offload import machine
from fxmem.errors import BudgetInfeasible
from fxmem.planners import Options, Solution, get_planner
from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import Kernel, State
from fxmem.planners.problem import reduce_program
from fxmem.schedule.actions import Tier
from tests.planners.test_instances import load


@pytest.mark.parametrize(
    ("planner", "share", "solve_s", "tiers"),
    [
        ("auto", 0.69, 0.4, ()),
        pytest.param("auto", 0.69, 0.4, ("host",), marks=pytest.mark.slow),
        ("auto", 0.6, 0.1, ()),
        ("auto", 0.6, 0.1, ("host",)),
        ("exact", 0.7, 0.3, ()),
    ],
)
def test_the_plan_of_a_slow_machine(
    planner: str, share: float, solve_s: float, tiers: tuple[Tier, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = reduce_program(load("resnet50_hf"))
    kernel = Kernel(problem)
    kernel.load(kernel.all_saved())
    budget = int(share * kernel.evaluate(0).peak_bytes)

    def solved() -> tuple[Solution | int, int]:
        options = replace(Options(solve_s=solve_s, machine=machine(problem, 4.0)), tiers=tiers, effort=Effort())
        try:
            found: Solution | int = get_planner(planner)(problem, budget, options)
        except BudgetInfeasible as error:
            found = error.min_bytes
        return found, options.effort.work

    quick = solved()
    load_state = Kernel.load

    def slow(self: Kernel, state: State) -> None:
        time.sleep(2e-3)
        load_state(self, state)

    monkeypatch.setattr(Kernel, "load", slow)
    assert solved() == quick
