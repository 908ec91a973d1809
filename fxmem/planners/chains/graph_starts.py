"""What the chain planners find, as starting states of other searches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxmem.errors import BudgetInfeasible
from fxmem.planners.kernel.binding import State
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.replay import state_of
from fxmem.planners.recompute.search import plan_recompute
from fxmem.planners.recompute.simple import narrow_cuts
from fxmem.planners.registry import Options, Solution, get_planner

_LONG = 32  # places to cut a chain at

NAMES = ("offload-all", "offload-greedy", "disk-revolve", "revolve", "pofo")
"""`rotor` and `offload-dp` are left out: pofo's search begins with theirs."""


def chain_solutions(problem: Problem, budget_bytes: int, options: Options) -> Iterator[Solution]:
    """The answers of the chain planners that find one, each what the planner of that name gives under these options."""
    for name in NAMES:
        try:
            found = get_planner(name)(problem, budget_bytes, options)
        except BudgetInfeasible:
            continue
        yield replace(found, notes={**found.notes, "found by": name})


def plan_alone(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Least extra time found by recomputation alone, on long chains also from rotor's plan.

    Raises BudgetInfeasible with the smallest peak found.
    """

    def nested(limit_bytes: int) -> State | None:
        if len(narrow_cuts(problem)) < _LONG:
            return None
        try:
            return state_of(problem, get_planner("rotor")(problem, limit_bytes, options).actions)
        except BudgetInfeasible as error:
            return state_of(problem, error.actions) if error.actions else None

    return plan_recompute(problem, budget_bytes, options, nested)
