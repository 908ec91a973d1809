"""What a call runs in a step of no known kind, and how earlier calls make room for it.

Calls whose backward is still to come were planned without knowing of those that follow. Where what they saved leaves
too little room, they give it back, and their forward runs again before their backward: one more forward each, in this
one step. Chen et al., Training Deep Nets with Sublinear Memory Cost, arXiv:1604.06174, does so for each segment.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxmem.budget import Budget, resolve_budget
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.step.call import Call
from fxmem.step.episode import Episode
from fxmem.step.first_plan import Surroundings
from fxmem.step.graph import Choose, Graph, Variant, storages_of
from fxmem.step.known import Known
from fxmem.step.standing import Standing

_LOGGER = logging.getLogger("fxmem")
Arguments = Sequence[tuple[int, int]]
"""(address, bytes) of the storage of each."""


@dataclass(frozen=True)
class Room:
    """`owner`: of the step's marks. `carried`: calls of earlier steps whose backward is still to come.

    `user_arguments`: of the user's call, if that is known. `others_bytes`: of models that may be part of the step.
    """

    owner: int
    settings: Settings
    budget: Budget
    standing: Standing
    kinds: Iterable[Known]
    carried: Sequence[Call]
    episode: Episode | None
    user_arguments: Any
    others_bytes: int

    def first(self, graph: Graph, arguments: Arguments, example_inputs: Sequence[Any]) -> Variant:
        """Of a graph that was captured just now. Raises BudgetInfeasible, CaptureError, PlanMismatch."""

        def choose(may_be_over: bool) -> Variant:
            return _compiled(
                graph, lambda made: self._around(made, arguments, may_be_over).plan(made, {}), example_inputs
            )

        return self._with_room(choose)

    def variant(self, graph: Graph, values: Mapping[str, int], arguments: Arguments) -> Variant:
        """For a call at the sizes `values`. Raises BudgetInfeasible, CaptureError, PlanMismatch."""
        return self._with_room(
            lambda may_be_over: self._fitting(graph, values, self._around(graph, arguments, may_be_over))
        )

    def _with_room(self, choose: Callable[[bool], Variant]) -> Variant:
        """`choose(may_be_over)`: what a call runs."""
        waiting = [call for call in self._calls if call.can_be_given_back] if isinstance(self.budget, int) else []
        if waiting:
            self._for_gradients(waiting)
        return self._or_given_back(choose, [call for call in waiting if call.again is None])

    @property
    def _calls(self) -> list[Call]:
        return [*self.carried, *(self.episode.calls if self.episode is not None else ())]

    def _for_gradients(self, waiting: Sequence[Call]) -> None:
        """The last call turns out not to be that of its step: gradients of others will stand when its own are made. If
        what it saved leaves no room for them, it gives that back, and runs again by a plan that does."""
        call = waiting[-1]
        assert call.arguments is not None
        arguments = storages_of(call.arguments.values, self.standing.device)
        given_bytes, returned_bytes = call.gradient_bytes
        more_bytes = returned_bytes - given_bytes - call.saved_bytes

        def choose(may_be_over: bool) -> Variant:
            around = self._around(call.graph, arguments, may_be_over, more_bytes)
            fits = around.suits(call.graph, call.variant, call.values)
            return call.variant if fits else self._fitting(call.graph, call.values, around)

        again = self._or_given_back(choose, waiting[:-1])
        if again is not call.variant:
            call.give_back(self.owner, again)

    def _or_given_back(self, choose: Callable[[bool], Variant], waiting: Sequence[Call]) -> Variant:
        """`choose(may_be_over)`, after `waiting` have given back what they saved if they must."""
        if waiting:
            with contextlib.suppress(BudgetInfeasible):
                return choose(False)
        for call in waiting:
            call.give_back(self.owner, call.variant)
        return choose(True)

    def _fitting(self, graph: Graph, values: Mapping[str, int], around: Surroundings) -> Variant:
        found = around.suitable(graph, values)
        if found is not None:
            return found
        if self.episode is not None:
            self.episode.has_compiled = True
        return _compiled(graph, lambda made: around.plan(made, values))

    def _around(self, graph: Graph, arguments: Arguments, may_be_over: bool, more_bytes: int = 0) -> Surroundings:
        """Of a call of `graph` with `arguments`, and `more_bytes` than stand now."""
        episode = self.episode

        def beside_bytes(program: Program) -> int:
            in_use, is_first = {address for address, _ in arguments}, graph.may_be_followed
            found = self.standing.beside_bytes(program, is_first, in_use, self.user_arguments, self.carried, episode)
            coming_bytes = 0 if episode is None else episode.tangent_bytes(in_use)
            return max(0, found + coming_bytes + more_bytes)

        is_beside = episode is not None and bool(episode.open_calls)
        is_unknown = self.user_arguments is None and isinstance(resolve_budget(self.budget), float)
        is_open = may_be_over and (is_beside or is_unknown)
        return Surroundings(
            self.settings, self.budget, beside_bytes, self.others_bytes, self.kinds, is_open, self._warn
        )

    def _warn(self) -> None:
        if self.episode is None or not self.episode.has_warned:
            _LOGGER.warning(
                "this step calls more graphs before its backward than any before: it may exceed its budget, this once; "
                "where that can't be, take a first step on a small batch"
            )
        if self.episode is not None:
            self.episode.has_warned = True


def _compiled(graph: Graph, choose: Choose, example_inputs: Sequence[Any] | None = None) -> Variant:
    """A variant of `graph`; where none is in budget, one that expects gradients of its loss only."""
    try:
        return graph.compile(choose, example_inputs)
    except BudgetInfeasible:
        if not graph.expect(graph.beside_the_loss):
            raise
    return graph.compile(choose, example_inputs)
