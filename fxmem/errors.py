"""Every error fxmem raises on purpose, all under :class:`FxmemError`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fxmem.units import format_bytes


class FxmemError(Exception):
    """Base class of fxmem's errors."""


class OptionError(FxmemError, ValueError):
    """An unknown option or a malformed value; the message names the choices."""


class VerifyError(FxmemError):
    """A program, schedule or graph breaks an invariant: a fault in fxmem or in a hand-made input."""


class CaptureError(FxmemError):
    """The model can't be captured as a training graph; `source` is the model's own line, if known."""

    def __init__(self, message: str, source: str | None = None) -> None:
        super().__init__(f"{message}\n  at {source}" if source else message)
        self.source = source


class PlanMismatch(FxmemError):
    """A plan made for another graph was applied to this one."""


class OffloadError(FxmemError):
    """Host memory or disk refused to hold offloaded bytes; nothing was lost, the step failed as a whole."""


class BudgetInfeasible(FxmemError):
    """No plan fits the budget.

    `min_bytes` is the smallest budget found feasible; `at_peak` lists what stands at that peak as (name, bytes);
    `actions`: the schedule that reaches it, if the planner told; `asked`: the budget as the user wrote it; `graph`:
    which of the captured graphs it is; `form`: of several ways to split them, the one that `actions` are of;
    `is_unsplit`: sizes that are symbols kept the graph from being split.
    """

    form: Any = None
    is_unsplit: bool = False

    def __init__(
        self,
        budget_bytes: int,
        min_bytes: int,
        at_peak: Sequence[tuple[str, int]] = (),
        where: str = "",
        actions: tuple[Any, ...] = (),
        *,
        asked: object = None,
        graph: str = "",
    ) -> None:
        shown = f"{budget_bytes} bytes" + (f", budget={asked!r}" if asked not in (None, budget_bytes) else "")
        lines = [
            f"no plan fits {format_bytes(budget_bytes)} ({shown}){where}; "
            f"the smallest feasible budget found is {format_bytes(min_bytes)} ({min_bytes} bytes)"
        ]
        lines += [f"  of graph {graph}"] if graph else []
        lines += [f"  {format_bytes(nbytes):>12}  {name}" for name, nbytes in at_peak]
        super().__init__("\n".join(lines))
        self.budget_bytes = budget_bytes
        self.min_bytes = min_bytes
        self.at_peak = tuple(at_peak)
        self.where = where
        self.actions = actions
        self.asked = asked
        self.graph = graph

    def of(self, asked: object, graph: str, where: str = "") -> BudgetInfeasible:
        """The same, saying what was asked and of which graph, and `where` besides."""
        given = (self.budget_bytes, self.min_bytes, self.at_peak, self.where + where, self.actions)
        error = BudgetInfeasible(*given, asked=asked, graph=graph)
        error.form, error.is_unsplit = self.form, self.is_unsplit
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        """An error may cross processes; without the schedule, which only planners use."""
        make = functools.partial(BudgetInfeasible, asked=self.asked, graph=self.graph)
        return make, (self.budget_bytes, self.min_bytes, self.at_peak, self.where)
