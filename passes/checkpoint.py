"""`checkpoint`: write a plan's schedule into the joint graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import fx

from fxmem.capture import JointGraph
from fxmem.ir.program import Program
from fxmem.passes.base import GraphPass, run_passes
from fxmem.passes.emit import emit
from fxmem.schedule.actions import Action

if TYPE_CHECKING:
    from fxmem.planning import Plan


@dataclass(frozen=True)
class Checkpoint(GraphPass):
    """Node order becomes the schedule `actions` over `program`; recomputed ops appear as `<name>_remat`."""

    program: Program = field(repr=False)
    actions: tuple[Action, ...] = field(repr=False)

    name: ClassVar[str] = "checkpoint"
    ensures: ClassVar[frozenset[str]] = frozenset({"regions", "recompute"})

    def apply(self, joint: JointGraph) -> JointGraph:
        return emit(joint, self.program, self.actions)


def rewrite(joint: JointGraph, program: Program, actions: tuple[Action, ...]) -> JointGraph:
    """`joint` with its nodes in the order of `actions`, under the pass contract."""
    return run_passes(joint, [Checkpoint(program, actions)]).joint


def apply_plan(joint: JointGraph, plan: Plan) -> fx.GraphModule:
    """The rewritten joint GraphModule of `plan`. Raises PlanMismatch if it was made for another graph."""
    return rewrite(joint, plan.program, plan.actions).graph_module
