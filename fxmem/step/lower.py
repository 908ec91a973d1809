"""Lowering: slice a joint graph, whose node order is the schedule, into the two modules that AOTAutograd runs.

Nothing is decided here. What a backward node reads of forward is saved: one tensor for each storage, because emission
made views again in backward; sizes are saved as numbers, constants are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import find_symbol_binding_fx_nodes, free_symbols

from fxmem import compat
from fxmem.capture import JointGraph, Partition, make_backend
from fxmem.capture.joint import from_aot, require_tensors
from fxmem.errors import VerifyError
from fxmem.passes.emit import part_of

Inner = Literal["eager", "inductor"]


@dataclass(frozen=True)
class Lowered:
    """Forward returns its outputs, `saved`, `saved_sizes`; backward takes `saved_sizes`, `saved` and the tangents."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    saved: tuple[str, ...]
    saved_sizes: tuple[str, ...]


def lower(joint: JointGraph) -> Lowered:
    """Cut `joint` at its boundary, keeping the node order of either side."""
    cut = _Cut(joint)
    return Lowered(
        forward=cut.forward(),
        backward=cut.backward(),
        saved=tuple(node.name for node in cut.tensors),
        saved_sizes=tuple(node.name for node in cut.sizes),
    )


def split(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) of `lower`, as a partition function returns them."""
    lowered = lower(joint)
    return lowered.forward, lowered.backward


class _Cut:
    """What crosses the boundary of a joint graph, in the order AOTAutograd wants it."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        nodes = joint.nodes
        self.before, self.after = nodes[: joint.num_forward_nodes], nodes[joint.num_forward_nodes :]
        self.position = {node: i for i, node in enumerate(nodes)}

    @cached_property
    def crossing(self) -> list[fx.Node]:
        """Forward nodes that backward reads or returns, in forward's order."""
        returned = [r for r in self.joint.outputs[self.joint.num_forward_outputs :] if isinstance(r, fx.Node)]
        read = {n for node in self.after for n in node.all_input_nodes} | set(returned)
        return [n for n in self.before if n in read and n.op != "get_attr" and not _is_constant(n)]

    @cached_property
    def tensors(self) -> list[fx.Node]:
        """Saved tensors; last those whose version nobody checks (kept on `ctx` by a custom autograd function)."""
        tensors = [n for n in self.crossing if isinstance(n.meta["val"], torch.Tensor)]
        return sorted(tensors, key=_is_unchecked)

    @cached_property
    def sizes(self) -> list[fx.Node]:
        """Saved numbers; first the symbols themselves, also those that only the sizes of saved tensors mention."""
        direct = [n for n in self.crossing if isinstance(n.meta["val"], (torch.SymInt, torch.SymFloat, torch.SymBool))]
        others = set(self.crossing) - set(direct) - set(self.tensors)
        if others:
            named = ", ".join(f"{n.name}: {type(n.meta['val']).__name__}" for n in others)
            raise VerifyError(f"backward reads values that can't be saved: {named}")
        binders = find_symbol_binding_fx_nodes(self.joint.graph_module.graph)
        tangents = [n for n in self.after if n.op == "placeholder"]
        symbols = {s for n in (*direct, *self.tensors, *tangents) for s in free_symbols(n.meta["val"])}
        bound = [binders[s] for s in sorted(symbols, key=str) if s in binders]
        return list(dict.fromkeys([*bound, *direct]))

    def forward(self) -> fx.GraphModule:
        joint = self.joint
        results = [*joint.outputs[: joint.num_forward_outputs], *self.tensors, *self.sizes]
        descriptions = _descriptions(joint)[: joint.num_forward_outputs]
        saved = [*map(_is_unchecked, self.tensors), *(False for _ in self.sizes)]
        descriptions += [compat.saved_description(i, unchecked) for i, unchecked in enumerate(saved)]
        inputs = [n for n in self.before if n.op == "placeholder"]
        return _extract(joint, inputs, self.before, results, descriptions)

    def backward(self) -> fx.GraphModule:
        joint = self.joint
        results = joint.outputs[joint.num_forward_outputs :]
        descriptions = _descriptions(joint)[joint.num_forward_outputs :]
        tangents = [n for n in self.after if n.op == "placeholder"]
        shared = [n for n in self.before if n.op == "get_attr"]
        module = _extract(joint, [*self.sizes, *self.tensors, *tangents], [*shared, *self.after], results, descriptions)
        for node in module.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                node.meta["autograd_backward"] = True  # the profiler's annotation of torch's own partitioners
        return module


def _extract(
    joint: JointGraph,
    inputs: Iterable[fx.Node],
    body: Iterable[fx.Node],
    results: Sequence[Any],
    descriptions: list[Any],
) -> fx.GraphModule:
    """A module that takes `inputs` and runs `body`; constants nobody reads are left out."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    for node in body:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, lambda n: copies[n] if n in copies else n.meta["val"])
    values = [copies.get(r, r.meta["val"]) if isinstance(r, fx.Node) else r for r in results]
    output = graph.output(tuple(values))
    output.meta["desc"] = descriptions
    output.meta["output_stack_traces"] = [v.meta.get("stack_trace") if isinstance(v, fx.Node) else None for v in values]
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return compat.module_of_graph(joint.graph_module, graph)


def _is_constant(node: fx.Node) -> bool:
    """Plain numbers (and None) in a captured graph are the same at every call: backward has them written in."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), (int, float, bool, type(None)))


def _is_unchecked(node: fx.Node) -> bool:
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def _descriptions(joint: JointGraph) -> list[Any]:
    output = joint.graph_module.graph.output_node()
    return list(output.meta.get("desc") or [None] * len(joint.outputs))


def backend(
    partition: Partition,
    inner: Inner = "eager",
    key: str = "",
    inference: Callable[[JointGraph], None] | None = None,
    trace: compat.AotTrace | None = None,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A Dynamo backend that runs what `partition` makes of each joint graph.

    `inner="eager"`: ATen ops one by one, at the price of torch's "aot_eager". `inner="inductor"`: inductor decomposes
    before `partition` sees the graph, and compiles the two modules without partitioning again. `key` names everything
    that `partition` depends on (budget, planner, options): compiled code is cached by it. `trace`: with "eager", what
    AOTAutograd traced of the graph before.
    """
    if inner == "eager":
        return make_backend(partition, inference=inference, trace=trace)
    return _inductor_backend(partition, key)


def _inductor_backend(partition: Partition, key: str) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    def compile_with_inductor(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        sources = [compat.placeholder_source(n) for n in module.graph.find_nodes(op="placeholder")]

        def partition_fn(joint: fx.GraphModule, static: Sequence[int], num_outputs: int) -> Any:
            captured = from_aot(joint, num_outputs, static, sources, replays=False)  # inductor moves nodes
            require_tensors(captured)
            return partition(captured)

        return compat.compile_with_inductor(module, example_inputs, partition_fn, key, part_of)

    return compile_with_inductor
