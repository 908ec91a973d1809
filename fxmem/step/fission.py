"""Splitting as one more thing that a plan decides: which of a graph's forms, split or not, costs least under a budget.

A form is judged first by what its program says at once: the peak with everything saved, the least that one op needs,
and the seconds that splitting adds by itself. Only those that may win are planned, a little at first, the best in full.
What is planned without splitting is always among the answers, so no plan is slower, and no smallest budget larger.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fxmem.budget import Budget, resolve_budget
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.planners.plan import Plan, baseline_actions, unplanned
from fxmem.planners.problem import reduce_program
from fxmem.planners.recompute.bound import least_bytes
from fxmem.schedule import simulate

T = TypeVar("T", bound=Hashable)

_WORTH = 0.005  # of the step: less extra time than this is not worth looking for
_TRIAL = 0.1  # of the usual work goes into each form's trial


@dataclass(frozen=True)
class Outlook(Generic[T]):
    """One way to split, and what its program says before it is planned."""

    key: T
    least_bytes: int
    peak_bytes: int
    split_s: float


Solve = Callable[[T, float], Plan]
"""Plan a form with a share of the usual work. Raises BudgetInfeasible."""


def cheapest(keys: Sequence[T], program_of: Callable[[T], Program], solve: Solve[T], budget: Budget) -> tuple[T, Plan]:
    """The form with the cheapest plan under `budget`, and that plan; `keys[0]` is the form that is not split.

    Raises BudgetInfeasible with the smallest budget that any of them was found to need.
    """
    forms = [look(key, program_of(key)) for key in keys]
    limit = _bytes(budget, program_of(keys[0]))
    if len(keys) == 1 or limit is None or forms[0].peak_bytes <= limit:
        return keys[0], solve(keys[0], 1.0)
    if budget == "min":
        return _smallest(forms, solve)
    return _Choice(solve, limit).among(forms)


def look(key: T, program: Program) -> Outlook[T]:
    problem = reduce_program(program)
    peak_bytes = simulate(program, baseline_actions(problem)).peak_bytes
    split_s = problem.baseline_s - reduce_program(program.reference).baseline_s if program.unsplit else 0.0
    return Outlook(key, least_bytes(problem), peak_bytes, split_s)


def _bytes(budget: Budget, program: Program) -> int | None:
    limit = resolve_budget(budget)
    if limit == "min":
        return 0
    return int(limit * unplanned(program).peak_bytes) if isinstance(limit, float) else limit


def _smallest(forms: Sequence[Outlook[T]], solve: Solve[T]) -> tuple[T, Plan]:
    """The form that goes lowest, among the two of least need and the unsplit one."""
    tried = dict.fromkeys([*(form.key for form in sorted(forms, key=lambda f: f.least_bytes)[:2]), forms[0].key])
    plans = [(key, solve(key, 1.0)) for key in tried]
    return min(plans, key=lambda found: (found[1].peak_bytes, found[1].extra_s))


class _Choice(Generic[T]):
    """The search for the cheapest form under one limit."""

    def __init__(self, solve: Solve[T], limit: int) -> None:
        self.solve, self.limit = solve, limit
        self.found: tuple[T, Plan] | None = None
        self.refusals: list[BudgetInfeasible] = []

    def among(self, forms: Sequence[Outlook[T]]) -> tuple[T, Plan]:
        unsplit, *split = forms
        if unsplit.least_bytes <= self.limit:
            self._try(unsplit, 1.0)
        for form in sorted((f for f in split if f.peak_bytes <= self.limit), key=lambda f: f.split_s)[:1]:
            self._try(form, 1.0)
        trials = [(trial.extra_s, form) for form in split if self._may_win(form) and (trial := self._try(form, _TRIAL))]
        for _, form in sorted(trials, key=lambda found: found[0])[:1]:
            self._try(form, 1.0)
        if self.found is None and unsplit.least_bytes > self.limit:
            self._try(unsplit, 1.0)
        if self.found is None:
            raise min(self.refusals, key=lambda error: error.min_bytes)
        return self.found

    def _may_win(self, form: Outlook[T]) -> bool:
        if form.least_bytes > self.limit or form.peak_bytes <= self.limit:
            return False
        if self.found is None:
            return True
        plan = self.found[1]
        return form.split_s < plan.extra_s - _WORTH * plan.baseline_s

    def _try(self, form: Outlook[T], share: float) -> Plan | None:
        try:
            plan = self.solve(form.key, share)
        except BudgetInfeasible as error:
            error.form = form.key
            self.refusals.append(error)
            return None
        if self.found is None or plan.extra_s < self.found[1].extra_s:
            self.found = form.key, plan
        return plan
