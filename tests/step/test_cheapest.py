"""The choice among forms, on programs made by hand and plans that say what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Op, Program, Storage
from fxmem.planners.plan import Plan, baseline_actions, judge
from fxmem.planners.problem import reduce_program
from fxmem.schedule import Machine
from fxmem.step.fission import Outlook, _Choice, cheapest, cheapest_by_turns


def program(nbytes: int, seconds: float = 1.0) -> Program:
    """One value that backward reads, made in `seconds`."""

    def op(index: int, region: str, args: tuple[int, ...], storage: int, seconds: float = 0.0) -> Op:
        is_input = not args
        return Op(index, f"op{index}", "t", region, args, (storage,), is_input=is_input, seconds=seconds)  # type: ignore[arg-type]

    return Program(
        "p",
        (op(0, "forward", (), 0), op(1, "forward", (0,), 1, seconds), op(2, "forward", (1,), 2),
         op(3, "backward", (), 3), op(4, "backward", (1, 3), 4, seconds)),
        (Storage(0, 8), Storage(1, nbytes), Storage(2, 4), Storage(3, 4), Storage(4, 8)),
        (2,), (4,),
    )  # fmt: skip


WHOLE = program(1000)
PARTS = replace(program(100, seconds=1.1), unsplit=WHOLE)
PROGRAMS = {"whole": WHOLE, "parts": PARTS}


def all_saved(made: Program) -> Plan:
    return judge(made, baseline_actions(reduce_program(made)), "none", None, Machine())


def as_captured(key: str) -> Plan:
    return all_saved(PROGRAMS[key])


def choose(limit: int, asked: list[str]) -> tuple[str, Plan]:
    def solve(key: str, share: float) -> Plan:
        asked.append(key)
        plan = as_captured(key)
        if plan.peak_bytes > limit:
            raise BudgetInfeasible(limit, plan.peak_bytes, actions=plan.actions)
        return plan

    return cheapest("whole", lambda: ["parts"], PROGRAMS.__getitem__, solve, limit)


def test_nothing_else_is_looked_at_where_everything_may_be_saved() -> None:
    asked: list[str] = []
    assert choose(2000, asked)[0] == "whole"
    assert asked == ["whole"]


def test_a_split_form_pays_for_its_own_kernels_and_wins_where_nothing_else_fits() -> None:
    key, plan = choose(500, [])
    assert key == "parts"
    assert plan.extra_s == pytest.approx(0.2)
    assert plan.baseline_peak_bytes == as_captured("whole").peak_bytes


def test_the_smallest_need_of_all_forms_is_named_and_whose_it_is() -> None:
    with pytest.raises(BudgetInfeasible) as refused:
        choose(10, [])
    assert refused.value.min_bytes == as_captured("parts").peak_bytes
    assert refused.value.form == "parts"
    with pytest.raises(BudgetInfeasible) as alone:
        cheapest("whole", list, PROGRAMS.__getitem__, lambda key, share: choose(10, [])[1], 10)
    assert alone.value.form == "whole"


@pytest.mark.parametrize("limit", [500, "min"])
def test_graphs_of_a_step_are_split_one_after_the_other(limit: int | str) -> None:
    """Each alone leaves what the other needs."""
    sizes = {(0, 0): 1000, (1, 0): 700, (0, 1): 800, (1, 1): 100}
    programs = {key: replace(program(n, seconds=1.0 + sum(key) / 10), unsplit=WHOLE) for key, n in sizes.items()}

    def others(key: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*key[:i], 1, *key[i + 1 :]) for i in range(2) if not key[i]]

    def solve(key: tuple[int, ...], share: float) -> Plan:
        plan = all_saved(programs[key])
        if limit != "min" and plan.peak_bytes > limit:
            raise BudgetInfeasible(limit, plan.peak_bytes, actions=plan.actions)
        return plan

    def chosen(num_turns: int) -> tuple[int, ...]:
        return cheapest_by_turns((0, 0), others, programs.__getitem__, solve, limit, num_turns)[0]

    assert chosen(2) == (1, 1)
    if limit == "min":
        assert chosen(1) == (1, 0)
    else:
        with pytest.raises(BudgetInfeasible):
            chosen(1)


@pytest.mark.parametrize(("bound_s", "in_full"), [(0.3, False), (0.1, True)])
def test_the_unsplit_form_is_searched_in_full_unless_another_one_is_below_its_bound(
    bound_s: float, in_full: bool
) -> None:
    asked: list[tuple[str, float]] = []
    costs = {"whole": (0.4, bound_s), "parts": (0.2, 0.0)}

    def solve(key: str, share: float) -> Plan:
        asked.append((key, share))
        extra_s, lower_bound_s = costs[key]
        return replace(as_captured(key), extra_s=extra_s, lower_bound_s=lower_bound_s)

    whole, parts = Outlook("whole", 100, 2000, 0.0), Outlook("parts", 50, 400, 0.1)
    assert _Choice(solve, 500).among(whole, [parts])[0] == "parts"
    assert (("whole", 1.0) in asked) == in_full


def test_forms_that_save_nothing_are_not_planned() -> None:
    asked: list[str] = []

    def solve(key: str, share: float) -> Plan:
        asked.append(key)
        return replace(as_captured(key), extra_s=0.5)

    whole, same, faster = (
        Outlook("whole", 100, 2000, 0.0),
        Outlook("same", 100, 2000, 0.0),
        Outlook("parts", 100, 2000, -0.1),
    )
    assert same.is_dominated_by(whole)
    assert not faster.is_dominated_by(whole)
    assert not Outlook("lower", 99, 2000, 0.1).is_dominated_by(whole)
    _Choice(solve, 500).among(whole, [same])
    assert set(asked) == {"whole"}


def test_the_unsplit_form_is_not_planned_to_its_smallest_where_another_one_is_below_it() -> None:
    asked: list[str] = []

    def solve(key: str, share: float) -> Plan:
        asked.append(key)
        return as_captured(key)

    assert cheapest("whole", lambda: ["parts"], PROGRAMS.__getitem__, solve, "min")[0] == "parts"
    assert set(asked) == {"parts"}
