"""What one stage runs for microbatches of one shape: forward, backward, and backward in two parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor, fx

from fxmem.capture import boxed
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.passes.checkpoint import rewrite
from fxmem.passes.split_backward import SplitBackward, split_backward
from fxmem.passes.stage_split import StageGraph
from fxmem.planners.plan import baseline_actions
from fxmem.planners.problem import reduce_program
from fxmem.runtime.pipeline.sink import with_sink
from fxmem.schedule import Action
from fxmem.step.lower import Lowered, lower

PlanStage: TypeAlias = Callable[[StageGraph, Program], Sequence[Action] | None]
"""Decides what one stage keeps and recomputes: actions over the stage's own program, or None to save everything."""

Run: TypeAlias = Callable[[list[Any]], Sequence[Tensor]]


def stage_program(graph: StageGraph) -> Program:
    """The stage's forward and backward of one microbatch as a Program."""
    return program_from_joint(graph.joint, name=f"stage {graph.index}")


class StageCode:
    """Boxed callables of one stage; every list of arguments is emptied as they are used.

    `runtime`: key of the engine that moves what `actions` offload; with 0 such a stage can be looked at, not run.
    """

    def __init__(self, graph: StageGraph, actions: Sequence[Action] | None = None, runtime: int = 0) -> None:
        self.graph = graph
        self.program = stage_program(graph)
        self.actions = tuple(actions if actions is not None else baseline_actions(reduce_program(self.program)))
        self._lowered: Lowered = lower(rewrite(graph.joint, self.program, self.actions, runtime))
        self._modules: dict[str, fx.GraphModule] = {}

    @property
    def num_results(self) -> int:
        """Results of forward that are not saved tensors."""
        return self.graph.joint.num_forward_outputs

    @cached_property
    def data_positions(self) -> tuple[int, ...]:
        """Which of the microbatch's tensors forward takes, in order."""
        descriptions = {n.name: n.meta["desc"] for n in self.graph.joint.nodes if n.name in set(self.graph.data)}
        return tuple(descriptions[name].idx for name in self.graph.data)

    @cached_property
    def tangents(self) -> tuple[Tensor, ...]:
        """Fake gradients of the outputs, in the last stage."""
        return tuple(self.graph.values(self.graph.joint.tangents)) if self.graph.is_last else ()

    @cached_property
    def split(self) -> SplitBackward:
        return split_backward(self._lowered.backward, len(self.graph.grad_sends))

    def module(self, kind: str) -> fx.GraphModule:
        """What an action of that kind runs: F forward, B backward, I and W its two parts; the last three take a `Sink`.
        """
        if kind not in self._modules:
            num_sends = len(self.graph.grad_sends)
            if kind == "F":
                made = self._lowered.forward
            elif kind == "B":
                made = with_sink(self._lowered.backward, num_sends, range(len(self.graph.gradients)))
            elif kind == "I":
                made = with_sink(self.split.inputs, num_sends, self.split.early)
            else:
                made = with_sink(self.split.weights, 0, self.split.late)
            self._modules[kind] = made
        return self._modules[kind]

    @cached_property
    def forward(self) -> Run:
        """[statics, data, receives] -> (results, saved tensors)."""
        return boxed(self.module("F"))

    @cached_property
    def backward(self) -> Run:
        """[saved tensors, grad_receives or tangents, sink] -> grad_sends."""
        return boxed(self.module("B"))

    @cached_property
    def input_backward(self) -> Run:
        """Like `backward` -> (grad_sends, kept)."""
        return boxed(self.module("I"))

    @cached_property
    def weight_backward(self) -> Run:
        """[held, kept, sink] -> ()."""
        return boxed(self.module("W"))
