"""The smallest schedules found so far: under the budget that an error named a search goes another way than before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from fxmem.errors import BudgetInfeasible
from fxmem.planners.problem import Problem
from fxmem.planners.registry import Options, Solution, get_planner
from fxmem.planners.tiers import fits
from fxmem.schedule import Action, simulate

_NUM_KEPT = 32
_found: OrderedDict[bytes, tuple[int, tuple[Action, ...]]] = OrderedDict()


def solve(planner: str, problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """The planner's answer; where it finds none under a budget that it named as feasible before, what it had then.

    Raises OptionError (unknown planner) and BudgetInfeasible.
    """
    if problem.num_kernels == 0:
        return _only(problem, budget_bytes)
    try:
        return get_planner(planner)(problem, budget_bytes, options)
    except BudgetInfeasible as error:
        key = _key(planner, problem, options)
        least_bytes, actions = _found.get(key, (error.min_bytes - problem.base_bytes + 1, ()))
        if problem.base_bytes + least_bytes <= budget_bytes:
            return Solution(actions, notes={"why": "the smallest schedule found before"})
        if error.min_bytes < problem.base_bytes + least_bytes and is_valid(error.actions, problem, options):
            _found[key] = error.min_bytes - problem.base_bytes, error.actions
            while len(_found) > _NUM_KEPT:
                _found.popitem(last=False)
        raise


def _only(problem: Problem, budget_bytes: int) -> Solution:
    """The one schedule of a program that computes nothing. Raises BudgetInfeasible."""
    actions = problem.actions((), 0)
    peak_bytes = simulate(problem.program, actions).peak_bytes
    if peak_bytes > budget_bytes:
        raise BudgetInfeasible(budget_bytes, peak_bytes)
    return Solution(actions, notes={"why": "nothing to compute"})


def is_valid(actions: tuple[Action, ...], problem: Problem, options: Options) -> bool:
    """Whether there are any, and no tier holds more than it can."""
    return bool(actions) and fits(simulate(problem.program, actions, options.machine), options.machine)


def _key(planner: str, problem: Problem, options: Options) -> bytes:
    """Of all that makes a schedule valid and gives it its peak above what is resident."""
    machine = options.machine
    digest = hashlib.blake2b(repr((planner, problem.num_forward, options.tiers, sorted(options.pinned))).encode())
    digest.update(repr((sorted(machine.links), sorted(machine.capacity_bytes.items()))).encode())
    for array in (
        problem.kernel_op, problem.workspace_bytes, problem.recomputable, problem.must_run, problem.read_ptr,
        problem.read_idx, problem.write_ptr, problem.write_idx, problem.nbytes, problem.keep_to_end,
    ):  # fmt: skip
        digest.update(array.tobytes())
    return digest.digest()
