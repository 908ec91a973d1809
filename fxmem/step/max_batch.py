"""The largest batch under a budget, from the symbolic peak of the tightest schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fxmem import compat
from fxmem.analysis.peak import solve_max
from fxmem.budget import resolve_budget
from fxmem.capture import JointGraph, capture
from fxmem.errors import BudgetInfeasible, CaptureError, OptionError
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.planners.plan import make_plan
from fxmem.step.graph_plan import annotated_program, planner_options

NUM_ROUNDS = 8


def largest_batch(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    made: Settings,
    resident_bytes: Callable[[Program], int],
    may_run: bool,
) -> int:
    """Solve peak(schedule, batch) <= budget for the batch, then tighten the schedule for one row more, until none fits.

    A schedule that fits at one size is a schedule at every size, so each round can only grow the batch.
    """
    budget_bytes = resolve_budget(made.budget)
    if not isinstance(budget_bytes, int):
        raise OptionError(f'max_batch needs a budget in bytes (an int or "24GiB"), not {made.budget!r}')
    joint = capture_batch(step, args, kwargs)
    symbol = batch_symbol(joint)
    program = annotated_program(joint, made, may_run)
    program = replace(program, extra_resident_bytes=resident_bytes(program))
    batch, best, least_bytes, start = program.hints[symbol], 0, 0, None
    for _ in range(NUM_ROUNDS):
        at_batch = program.at({**program.hints, symbol: batch})
        plan = make_plan(at_batch, "min", made.planner, planner_options(program, made, start=start))
        start = plan.actions
        least_bytes = plan.peak_bytes_at({**program.hints, symbol: 1})
        found = solve_max(plan.peak_expr, symbol, budget_bytes)
        if found <= best:
            break
        best, batch = found, found + 1
    if not best:
        raise BudgetInfeasible(budget_bytes, least_bytes, where=" with a batch of 1")
    return best


def capture_batch(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> JointGraph:
    """The step's graph with the first dimension of every tensor argument a symbol. Raises CaptureError."""

    def mark(tensor: Tensor) -> Tensor:
        return compat.with_symbolic_batch(tensor.detach().requires_grad_(tensor.requires_grad))

    graphs = capture(step, *compat.tree_map_only(Tensor, mark, (tuple(args), dict(kwargs or {}))))
    if len(graphs) > 1:
        raise CaptureError("the model breaks into several graphs, so its peak is not one expression of the batch")
    return graphs[0]


def batch_symbol(joint: JointGraph) -> str:
    """Name of the size symbol that is the batch. Raises CaptureError when the model fixed it to a number."""
    for node in joint.graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.ndim and node.name not in joint.static_inputs:
            name = compat.symbol_name(value.shape[0])
            if name is not None:
                return name
    raise CaptureError("the model fixes its batch size to a number (give a batch of at least 2)")
