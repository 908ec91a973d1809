"""A stage in its forms: as it was cut, and with a region of it in parts, planned under the same room.

Microbatches split the batch already, so that only regions around a large value are tried, not the whole stage. What is
planned without splitting is always among the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Fission, Program
from fxmem.passes.stage_split import StageGraph
from fxmem.pipelining.stage_plan import StageActions, StagePlanner
from fxmem.step.candidates import Candidates, at_sizes, split_graph
from fxmem.step.fission import WORTH

Fissions = tuple[Fission, ...]
Form = tuple[Fissions, StagePlanner, float]
"""Regions in parts, the planner of the stage with them so, and the seconds that splitting adds by itself."""


def split_stage(graph: StageGraph, fissions: Fissions) -> StageGraph:
    """`graph` with those regions in parts, also for microbatches of other sizes than those it was planned for.

    Raises PlanMismatch, VerifyError where that can't be.
    """
    if not fissions:
        return graph
    joint = split_graph(graph.joint, at_sizes(graph.joint, fissions))
    names = [result.name for result in joint.outputs]
    forward, backward = names[: joint.num_forward_outputs], names[joint.num_forward_outputs :]
    sends = () if graph.is_last else tuple(forward)
    return replace(graph, joint=joint, sends=sends, grad_sends=tuple(backward[: len(graph.grad_sends)]))


class StageForms:
    """Plans a stage in the cheapest of its forms. `whole`: the planner of the stage unsplit; `planner_of`: of a form.
    `program`: of the stage unsplit.
    """

    def __init__(
        self, graph: StageGraph, program: Program, whole: StagePlanner, planner_of: Callable[[Fissions], StagePlanner]
    ) -> None:
        self._graph, self._program, self._whole, self._planner_of = graph, program, whole, planner_of

    @cached_property
    def _split(self) -> list[Form]:
        """Those of the fewest kernels first."""
        found = Candidates(self._graph.joint, self._program, whole=False).fissions
        planners = [(some, self._planner_of(some)) for some in found]
        whole_s = _seconds(self._whole.everything_saved)
        return [(some, planner, _seconds(planner.everything_saved) - whole_s) for some, planner in planners]

    @property
    def everything_saved(self) -> StageActions:
        return self._whole.everything_saved

    def plan(self, room_bytes: int, in_flight: int) -> StageActions:
        """The fastest way found that fits `room_bytes` with `in_flight` microbatches.

        Raises BudgetInfeasible with the least room that any form was found to need.
        """
        enough_s = WORTH * _seconds(self.everything_saved)
        found: list[StageActions] = []
        refusals: list[BudgetInfeasible] = []
        least_s = math.inf
        for fissions, planner, split_s in self._forms():
            if split_s < least_s - enough_s:
                try:
                    found.append(_noted(planner.plan(room_bytes, in_flight), fissions, split_s))
                except BudgetInfeasible as error:
                    refusals.append(error)
            least_s = min((way.extra_s for way in found), default=math.inf)
            if least_s <= enough_s:
                break
        if not found:
            raise min(refusals, key=lambda error: error.min_bytes)
        return min(found, key=lambda way: way.extra_s)

    def _forms(self) -> Iterator[Form]:
        """The stage whole, then in parts."""
        yield (), self._whole, 0.0
        yield from self._split

    def smallest(self, in_flight: int) -> StageActions:
        """The way of least bytes found."""
        whole = self._whole.smallest(in_flight)
        lower = [form for form in self._split if form[1].least_bytes < self._whole.least_bytes]
        if not lower:
            return whole
        fissions, planner, split_s = min(lower, key=lambda form: form[1].least_bytes)
        split = _noted(planner.smallest(in_flight), fissions, split_s)
        return min(whole, split, key=lambda way: way.need_bytes(in_flight))


def _noted(made: StageActions, fissions: Fissions, split_s: float) -> StageActions:
    return replace(made, fissions=fissions, extra_s=made.extra_s + split_s)


def _seconds(way: StageActions) -> float:
    return way.forward_s + way.backward_s
