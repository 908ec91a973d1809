"""The largest batch under a budget: from the symbolic peak of the tightest schedule, and beyond it by splitting.

A graph that is split has numbers for sizes, so that each batch tried beyond has a graph of its own, captured on fakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fxmem import compat
from fxmem.analysis.peak import solve_max
from fxmem.budget import resolve_budget
from fxmem.capture import JointGraph, capture
from fxmem.errors import BudgetInfeasible, CaptureError, OptionError
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.planners.plan import make_plan
from fxmem.step.forms import may_split, plan_graph
from fxmem.step.graph_plan import annotated_program, planner_options

NUM_ROUNDS = 8
_MOST_TRIED = 12  # batches, of graphs that may be split
_NEAR = 0.005  # of a batch: closer to the largest is not searched


def largest_batch(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    made: Settings,
    resident_bytes: Callable[[Program], int],
    may_run: bool,
) -> int:
    """The largest batch found whose step has a plan under the budget.

    `resident_bytes(program)`: bytes beside it. `may_run`: single ops may be measured. Raises BudgetInfeasible,
    CaptureError, OptionError.
    """
    budget_bytes = resolve_budget(made.budget)
    if not isinstance(budget_bytes, int):
        raise OptionError(f'max_batch needs a budget in bytes (an int or "24GiB"), not {made.budget!r}')
    if not isinstance(made.fission, str):
        raise OptionError('regions to split are those of one batch: max_batch takes fission="auto" or "off"')
    joint = capture_batch(step, args, kwargs)
    symbol = batch_symbol(joint)
    program = annotated_program(joint, made, may_run)
    program = replace(program, extra_resident_bytes=resident_bytes(program))
    best, least_bytes = _unsplit(program, symbol, made, budget_bytes)
    if may_split(made):
        rows = program.hints[symbol]

        def need_bytes(batch: int) -> int:
            (joint,) = capture(step, *compat.tree_map_only(Tensor, _resized(rows, batch), (tuple(args), kwargs or {})))
            return plan_graph(joint, made, "min", resident_bytes, may_run).peak_bytes

        found = _Beyond(need_bytes, budget_bytes, best)
        best, least_bytes = found.search(), min(least_bytes, found.needs.get(1, least_bytes))
    if not best:
        raise BudgetInfeasible(budget_bytes, least_bytes, where=" with a batch of 1")
    return best


def _unsplit(program: Program, symbol: str, made: Settings, budget_bytes: int) -> tuple[int, int]:
    """The largest batch (0 if there is none), and what a batch of one needs, of the graph as it was captured.

    Solve peak(schedule, batch) <= budget for the batch, then tighten the schedule for one row more, until none fits: a
    schedule that fits at one size is a schedule at every size, so each round can only grow the batch.
    """
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
    return best, least_bytes


def _resized(rows: int, batch: int) -> Callable[[Tensor], Tensor]:
    """A fake of a tensor, with a `batch` where it has so many `rows`."""

    def resized(tensor: Tensor) -> Tensor:
        (fake,) = compat.fakes_of([tensor.detach()])
        if fake.ndim and fake.shape[0] == rows:
            fake = torch.empty_like(fake[:1].expand(batch, *fake.shape[1:]))
        return fake.requires_grad_(tensor.requires_grad)

    return resized


@dataclass
class _Beyond:
    """The search for a batch larger than `best`, the largest that fits unsplit; bytes grow about linearly with it.

    `needs`: bytes of the batches tried.
    """

    need_bytes: Callable[[int], int]
    budget_bytes: int
    best: int
    needs: dict[int, int] = field(default_factory=dict)

    def search(self) -> int:
        """The largest batch found to fit, `best` if none beyond it does."""
        batch, limit = max(1, 2 * self.best), None
        while len(self.needs) < _MOST_TRIED:
            self.needs[batch] = self.need_bytes(batch)
            if self.needs[batch] <= self.budget_bytes:
                self.best = batch
            else:
                limit = batch
            if limit is not None and limit - self.best <= max(1, _NEAR * self.best):
                break
            guess = max(self._guess(batch), self.best + 1)
            if limit is not None and not self.best + 1 < guess < limit - 1:
                guess = (self.best + limit) // 2
            batch = guess
        return self.best

    def _guess(self, batch: int) -> int:
        """Where a line through the last batch and the one nearest to it meets the budget."""
        need = self.needs[batch]
        others = self.needs.keys() - {batch}
        near = min(others, key=lambda other: abs(other - batch), default=None)
        if near is None or self.needs[near] == need:
            return 2 * batch if need <= self.budget_bytes else batch * self.budget_bytes // need
        slope = (need - self.needs[near]) / (batch - near)
        return max(1, min(4 * batch, batch + int((self.budget_bytes - need) // slope))) if slope > 0 else 2 * batch


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
