"""Splitting as one more thing that a plan decides: which of a graph's forms, split or not, costs least under a budget.

A form is judged first by what its program says at once: the peak with everything saved, the least that one op needs,
and the seconds that splitting adds by itself. Only those that may win are planned, a little at first, the best in full.
What is planned without splitting is always among the answers, so no plan is slower, and no smallest budget larger.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxmem.budget import Budget, resolve_budget
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners.plan import Plan, baseline_actions, unplanned
from fxmem.planners.problem import reduce_program
from fxmem.planners.recompute.bound import least_bytes
from fxmem.planners.recompute.interleaved import interleaved
from fxmem.schedule import simulate

T = TypeVar("T", bound=Hashable)

WORTH = 0.005
"""Of the step: less extra time than this is not worth looking for."""
_LOWER = 0.99  # of the smallest budget: so little less is not worth looking for, either
_TRIAL = 0.1  # of the usual work goes into each form's trial


@dataclass(frozen=True)
class Outlook(Generic[T]):
    """One way to split, and what its program says before it is planned."""

    key: T
    least_bytes: int
    peak_bytes: int
    split_s: float

    def is_dominated_by(self, other: Outlook[T]) -> bool:
        """Does it take as long, and saves nothing, neither with everything kept nor at the least?"""
        is_lower = self.peak_bytes < other.peak_bytes or self.least_bytes < other.least_bytes
        return self.split_s >= other.split_s and not is_lower


Solve = Callable[[T, float], Plan]
"""Plan a form with a share of the usual work. Raises BudgetInfeasible."""


def cheapest(
    first: T, others: Callable[[], Sequence[T]], program_of: Callable[[T], Program], solve: Solve[T], budget: Budget
) -> tuple[T, Plan]:
    """The form with the cheapest plan under `budget`, and that plan: of the `first`, which is not split, and `others`,
    which are looked for only where the budget makes a difference.

    Raises BudgetInfeasible with the smallest budget that any of them was found to need.
    """
    program = program_of(first)
    limit = _bytes(budget, program)
    if limit is None:
        return first, _solved(solve, first)
    unsplit = look(first, program)
    keys = others() if unsplit.peak_bytes > limit else []
    if not keys:
        return first, _solved(solve, first)
    outlooks = (look(key, program_of(key)) for key in keys)
    if budget == "min":
        return _smallest(unsplit, outlooks, solve)
    return _Choice(solve, limit).among(unsplit, outlooks)


def cheapest_by_turns(
    first: T,
    others: Callable[[T], Sequence[T]],
    program_of: Callable[[T], Program],
    solve: Solve[T],
    budget: Budget,
    num_turns: int,
) -> tuple[T, Plan]:
    """`cheapest` where several graphs may be split: `others(form)` splits one more of them than `form` does.

    Raises BudgetInfeasible, as `cheapest` does.
    """
    plans: list[tuple[T, Plan]] = []
    refusals: list[BudgetInfeasible] = []
    for _ in range(num_turns):
        others_now = functools.partial(others, first)
        try:
            plans.append(cheapest(first, others_now, program_of, solve, budget))
        except BudgetInfeasible as error:
            refusals.append(error)
        form = plans[-1][0] if plans else refusals[-1].form or first
        is_good = bool(plans) and budget != "min" and plans[-1][1].extra_s <= WORTH * plans[-1][1].baseline_s
        if form == first or is_good:
            break
        first = form
    if not plans:
        raise min(refusals, key=lambda error: error.min_bytes)
    return min(plans, key=_lower if budget == "min" else lambda made: made[1].extra_s)


def look(key: T, program: Program) -> Outlook[T]:
    """What `program` says of a form."""
    problem = reduce_program(program)
    peak_bytes = simulate(program, baseline_actions(problem)).peak_bytes
    split_s = problem.baseline_s - reduce_program(program.reference).baseline_s if program.unsplit else 0.0
    anywhere = interleaved(program)
    least = least_bytes(problem) if anywhere is None else min(least_bytes(problem), least_bytes(anywhere))
    return Outlook(key, least, peak_bytes, split_s)


def _bytes(budget: Budget, program: Program) -> int | None:
    limit = resolve_budget(budget)
    if limit == "min":
        return 0
    return int(limit * unplanned(program).peak_bytes) if isinstance(limit, float) else limit


def _solved(solve: Solve[T], key: T, share: float = 1.0) -> Plan:
    """The plan of a form; where there is none, the error says of which form."""
    try:
        return solve(key, share)
    except BudgetInfeasible as error:
        error.form = key
        raise


def _smallest(unsplit: Outlook[T], others: Iterable[Outlook[T]], solve: Solve[T]) -> tuple[T, Plan]:
    """The form that goes lowest: of `others`, those of least need are tried first, as long as the next may be lower by
    what is worth it. The unsplit one is left out only where it can't be lower at all."""
    needs: dict[T, int] = {}
    for form in sorted(others, key=lambda form: form.least_bytes):
        if form.least_bytes < _LOWER * min(needs.values(), default=math.inf):
            needs[form.key] = _solved(solve, form.key, _TRIAL).peak_bytes
    key = min(needs, key=needs.__getitem__)
    plans = [(key, _solved(solve, key))]
    if unsplit.least_bytes < plans[0][1].peak_bytes:
        plans.append((unsplit.key, _solved(solve, unsplit.key)))
    return min(plans, key=_lower)


def _lower(made: tuple[T, Plan]) -> tuple[int, float]:
    return made[1].peak_bytes, made[1].extra_s


class _Choice(Generic[T]):
    """The search for the cheapest form under one limit."""

    def __init__(self, solve: Solve[T], limit: int) -> None:
        self.solve, self.limit = solve, limit
        self.found: tuple[T, Plan] | None = None
        self.refusals: list[BudgetInfeasible] = []

    def among(self, unsplit: Outlook[T], others: Iterable[Outlook[T]]) -> tuple[T, Plan]:
        """`others` are made one by one, as long as what was found may be worth improving. The unsplit form is planned
        in full unless another one's trial is below its bound."""
        may_fit = unsplit.least_bytes <= self.limit
        whole = self._try(unsplit, _TRIAL) if may_fit else None
        trials, looked = [], [unsplit]
        for form in others if not self._is_good else ():
            looked.append(form)
            if self._may_win(form, unsplit) and (trial := self._try(form, _TRIAL)) is not None:
                trials.append((trial.extra_s, form))
            if self._is_good:
                break
        if may_fit and (whole is None or self._best_s >= whole.lower_bound_s):
            self._try(unsplit, 1.0)
        for extra_s, form in sorted(trials, key=lambda found: found[0])[:1]:
            if form.peak_bytes > self.limit and extra_s > form.split_s:
                self._try(form, 1.0)
        if self.found is None:  # then the error names the smallest budget of the one that needs least
            self._try(min(looked, key=lambda form: form.least_bytes), 1.0)
        if self.found is None:
            raise min(self.refusals, key=lambda error: error.min_bytes)
        return self.found

    @property
    def _best_s(self) -> float:
        return math.inf if self.found is None else self.found[1].extra_s

    @property
    def _is_good(self) -> bool:
        """Is there nothing left to gain that is worth the search?"""
        return self.found is not None and self.found[1].extra_s <= WORTH * self.found[1].baseline_s

    def _may_win(self, form: Outlook[T], unsplit: Outlook[T]) -> bool:
        if form.least_bytes > self.limit or form.is_dominated_by(unsplit):
            return False
        return self.found is None or form.split_s < self.found[1].extra_s - WORTH * self.found[1].baseline_s

    def _try(self, form: Outlook[T], share: float) -> Plan | None:
        try:
            plan = _solved(self.solve, form.key, share)
        except BudgetInfeasible as error:
            self.refusals.append(error)
            return None
        if plan.extra_s < self._best_s:
            self.found = form.key, plan
        return plan
