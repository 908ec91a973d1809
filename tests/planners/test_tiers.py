"""One plan over several tiers: capacities kept, never slower than one tier alone, never below the bound."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.plan import Plan, make_plan
from fxmem.planners.problem import reduce_program
from fxmem.planners.tiers import fits, spread
from fxmem.schedule import Machine, simulate
from fxmem.schedule.actions import Offload
from fxmem.schedule.simulate import Link
from fxmem.testing import programs
from tests.planners.models import MIB
from tests.planners.test_offload import unrecomputable


def options(host_bytes_per_s: float, disk_bytes_per_s: float, **capacity_bytes: int) -> Options:
    links = {
        "disk": Link(disk_bytes_per_s, disk_bytes_per_s),
        "host": Link(host_bytes_per_s, host_bytes_per_s),
    }
    machine = Machine(links, capacity_bytes)  # type: ignore[arg-type]
    return Options(solve_s=0.15, tiers=("host", "disk"), machine=machine)


def tiers_of(plan: Plan) -> set[str]:
    return {action.tier for action in plan.actions if isinstance(action, Offload)}


def test_what_the_host_can_not_hold_goes_to_the_disk() -> None:
    program = unrecomputable()
    both = options(64 * MIB, 16 * MIB, host=2 * MIB)
    least = make_plan(program, "min", "auto", replace(both, machine=Machine(both.machine.links)))
    with pytest.raises(BudgetInfeasible):
        make_plan(program, least.peak_bytes, "auto", replace(both, tiers=("host",)))
    disk = make_plan(program, least.peak_bytes, "auto", replace(both, tiers=("disk",)))
    plan = make_plan(program, least.peak_bytes, "auto", both)
    assert tiers_of(plan) == {"host", "disk"}
    assert 0 < plan.simulation.tier_peak_bytes["host"] <= 2 * MIB
    assert plan.extra_s <= disk.extra_s
    assert plan.lower_bound_s <= plan.extra_s


def test_two_links_carry_more_than_one() -> None:
    """Even with room for everything on the host, a disk nearly as fast takes a part of the copies."""
    program, both = unrecomputable(), options(0.5 * MIB, 0.4 * MIB)
    alone = make_plan(program, 0.6, "auto", replace(both, tiers=("host",)))
    plan = make_plan(program, 0.6, "auto", both)
    assert tiers_of(plan) == {"host", "disk"}
    assert plan.lower_bound_s <= plan.extra_s < alone.extra_s


def test_tiers_that_together_hold_too_little_name_a_budget_that_works() -> None:
    program, both = unrecomputable(), options(64 * MIB, 16 * MIB, host=2 * MIB, disk=MIB)
    least = make_plan(program, "min", "auto", replace(both, machine=Machine(both.machine.links)))
    with pytest.raises(BudgetInfeasible) as caught:
        make_plan(program, least.peak_bytes, "auto", both)
    plan = make_plan(program, caught.value.min_bytes, "auto", both)
    assert plan.peak_bytes <= caught.value.min_bytes


@settings(max_examples=60)
@given(programs(), st.floats(0.0, 1.0), st.sampled_from([0.5, 8.0, 100.0]))
def test_spreading_keeps_the_memory_and_the_capacities(program: Program, share: float, pace: float) -> None:
    roomy = options(pace, pace / 4)
    problem = reduce_program(program)
    try:
        found = make_plan(program, 0.7, "offload-all", replace(roomy, tiers=("host",)))
    except BudgetInfeasible:
        return
    held = found.simulation.tier_peak_bytes.get("host", 0)
    small = options(pace, pace / 4, host=int(share * held))
    actions = spread(problem, found.actions, small)
    assert actions is not None
    result = simulate(program, actions, small.machine)
    assert fits(result, small.machine)
    assert result.bytes_at.tolist() == found.simulation.bytes_at.tolist()
    assert result.bytes_moved == found.simulation.bytes_moved
    assert (spread(problem, found.actions, options(pace, pace / 4, host=0, disk=0)) is None) == (held > 0)
