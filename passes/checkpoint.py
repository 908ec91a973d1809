"""`checkpoint`: write a plan's schedule into the joint graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import fx

from fxmem.capture import JointGraph
from fxmem.ir.program import Program
from fxmem.passes.base import GraphPass, run_passes
from fxmem.passes.emit import emit
from fxmem.passes.offload import RUNTIME
from fxmem.schedule.actions import Action

if TYPE_CHECKING:
    from fxmem.planners.plan import Plan


@dataclass(frozen=True)
class Checkpoint(GraphPass):
    """Node order becomes the schedule `actions` over `program`; recomputed ops appear as `<name>_remat`.

    `runtime`: key of the engine that moves what `actions` offload (see `fxmem.passes.offload`).
    """

    program: Program = field(repr=False)
    actions: tuple[Action, ...] = field(repr=False)
    runtime: int = 0

    name: ClassVar[str] = "checkpoint"
    ensures: ClassVar[frozenset[str]] = frozenset({"regions", "recompute", "offload"})

    def apply(self, joint: JointGraph) -> JointGraph:
        return emit(joint, self.program, self.actions, {RUNTIME: self.runtime})


def rewrite(joint: JointGraph, program: Program, actions: tuple[Action, ...], runtime: int = 0) -> JointGraph:
    """`joint` with its nodes in the order of `actions`, under the pass contract.

    `runtime`: `Transfers.key` of what the actions offload; with 0 the graph can be printed and lowered, not run.
    """
    return run_passes(joint, [Checkpoint(program, actions, runtime)]).joint


def apply_plan(joint: JointGraph, plan: Plan) -> fx.GraphModule:
    """The rewritten joint GraphModule of `plan`. Raises PlanMismatch if it was made for another graph."""
    return rewrite(joint, plan.program, plan.actions).graph_module
