"""One callable that takes part in a step: what torch compiled of it, and the step that its calls belong to.

Models that train in one loop stand on one device: those with the same number of bytes for a budget are one step, under
one budget, once they are seen to be called together, or in turns.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxmem import compat
from fxmem.budget import resolve_budget
from fxmem.capture.traced import Backend, Traced
from fxmem.errors import BudgetInfeasible
from fxmem.options import Settings
from fxmem.step.compiled import Step

_LOGGER = logging.getLogger("fxmem")
_steps: weakref.WeakSet[Step] = weakref.WeakSet()


class _Turns(threading.local):
    """The steps that ran last on this thread, the last one at the end, none twice."""

    def __init__(self) -> None:
        self.steps: list[weakref.ref[Step]] = []


_turns = _Turns()


class Member:
    """`function`, compiled. Called, it runs as part of its step. Raises OptionError."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self._function = function
        self._step = Step(function, settings)
        self._can_change = settings.dynamic is None and settings.capture == "dynamo"
        if settings.capture == "trace":
            self._compiled: Callable[..., Any] = Traced(function, _backend_of(self._step))
        else:
            self._compiled = compat.isolated_compile(function, _backend_of(self._step), dynamic=settings.dynamic)
        self._step.others = functools.partial(_functions_beside, weakref.ref(self._step))
        _steps.add(self._step)

    @property
    def step(self) -> Step:
        return self._step.leader

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A graph that can't do without splitting is captured anew with numbers for sizes where Dynamo had made symbols
        of those that were seen to change: from then on every size has a graph of its own.

        Raises BudgetInfeasible, CaptureError, PlanMismatch.
        """
        _meet(self.step)
        step = self.step
        before = step.num_finished
        try:
            return step.call(self._function, self._compiled, args, kwargs)
        except BudgetInfeasible as error:
            if not (error.is_unsplit and self._can_change) or step.num_finished != before:
                raise
        _LOGGER.info("the step has to be split to fit: from now on it is compiled for each size of its inputs")
        self._can_change = False
        self._compiled = compat.isolated_compile(self._function, _backend_of(step), dynamic=False)
        return step.call(self._function, self._compiled, args, kwargs)


def _backend_of(step: Step) -> Backend:
    """Of `step`, which it does not keep alive."""
    found = weakref.ref(step)

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        living = found()
        assert living is not None, "whoever calls what was compiled holds its step"
        return living.backend(module, example_inputs)

    return backend


def _meet(step: Step) -> None:
    """`step` is about to run: if another one's forward waits for its backward, or they take turns, they are one."""
    if not _is_shareable(step):
        return
    before = [turn for ref in _turns.steps if (turn := ref()) is not None and turn.leader is turn]
    waiting = (other for other in _steps if other is not step and other.is_in_forward and other.leader is other)
    outer = next((other for other in waiting if _share_budget(other, step)), None)
    if outer is not None:
        outer.take(step)
        step = outer
    elif step in before:
        for other in before[before.index(step) + 1 :]:
            if _share_budget(other, step):
                step.take(other)
    _turns.steps = [weakref.ref(turn) for turn in before if turn is not step] + [weakref.ref(step)]


def _functions_beside(found: weakref.ref[Step]) -> list[Callable[..., Any]]:
    """What was compiled with the same number of bytes: it stands on the device, too, if it is trained with this, on the
    same thread."""
    step = found()
    if step is None or not _is_shareable(step):
        return []
    leaders = [other for other in _steps if other is not step and other.leader is other]
    others = [other for other in leaders if other.thread == threading.get_ident() and _share_budget(other, step)]
    return [function for other in others for function in other.functions]


def _is_shareable(step: Step) -> bool:
    """Is it held to a number of bytes, which other models may be, too?"""
    return isinstance(resolve_budget(step.settings.budget), int) and step.settings.plan is None


def _share_budget(one: Step, other: Step) -> bool:
    """Are both held to one number of bytes, by equal means?"""
    budgets = {resolve_budget(step.settings.budget) for step in (one, other)}
    return len(budgets) == 1 and _of_planning(one.settings) == _of_planning(other.settings)


def _of_planning(made: Settings) -> Settings:
    """`made`, without what is each model's own."""
    return replace(
        made, budget=None, optimizer=None, loss_fn=None, outputs=None, dynamic=None, capture="dynamo", solve_s=None
    )
