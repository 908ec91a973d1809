"""A joint graph under construction whose nodes carry fake values that alias as the real ones will."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.passes.emit import META
from fxmem.passes.fakes import Fakes

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


class PartGraph:
    """`graph`, and how nodes get into it. `region`: of the nodes made from now on.

    A value that is captured stays the same object; whatever else is made is run on fake tensors, so that views share
    the storage of their base, writes in place that of their target, and nothing else shares any.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.region = "forward"
        self._lines: dict[fx.Node, str] = {}
        self._captured: set[fx.Node] = set()
        self._fakes = Fakes(compat.fake_mode_of(joint.nodes))

    def copy(self, node: fx.Node, current: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """`node` as it was, reading `current` of what it read."""
        copied = self.graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, current),
            fx.map_arg(node.kwargs, current),
            name=node.name,
            type_expr=node.type,
        )
        copied.meta = dict(node.meta)
        self._note(copied, node)
        if node.op != "call_function" or self._captured.issuperset(copied.all_input_nodes) or not shares_storage(node):
            self._captured.add(copied)
        else:
            copied.meta["val"] = self._run(copied)
        return copied

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        name: str,
        source: fx.Node,
        kwargs: Mapping[str, Any] | None = None,
        **note: Any,
    ) -> fx.Node:
        """A call that serves `source`, a captured node, whose metadata it takes over; `note`: what META says of it."""
        node = self.graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
        node.meta = {**source.meta, META: {**source.meta.get(META, {}), **note}}
        self._note(node, source)
        try:
            node.meta["val"] = self._run(node)
        except RuntimeError:
            if target not in _VIEWS:
                raise
            self._make_viewable(node, source, note)
        return node

    def finish(self, results: Any, num_forward_nodes: int) -> JointGraph:
        self.graph.output(results).meta = dict(self.joint.graph_module.graph.output_node().meta)
        self.graph.lint()
        module = compat.module_of_graph(self.joint.graph_module, self.graph, "Joint")
        module.meta = dict(self.joint.graph_module.meta)
        sources = {node.name: line for node, line in self._lines.items()}
        return replace(self.joint, graph_module=module, num_forward_nodes=num_forward_nodes, sources=sources)

    def _make_viewable(self, node: fx.Node, source: fx.Node, note: Mapping[str, Any]) -> None:
        """A part need not be laid out as the whole is: where it can't be viewed like that, view a copy of it."""
        with self.graph.inserting_before(node):
            clone = self.call(
                aten.clone.default,
                (node.args[0],),
                f"{node.name}_contiguous",
                source,
                {"memory_format": torch.contiguous_format},
                **note,
            )
        node.args = (clone, *node.args[1:])
        node.meta["val"] = self._run(node)

    def _note(self, node: fx.Node, source: fx.Node) -> None:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = f"is_{self.region}"
        if source.name in self.joint.sources:
            self._lines[node] = self.joint.sources[source.name]

    def _run(self, node: fx.Node) -> Any:
        return self._fakes.of(node)


def shares_storage(node: fx.Node) -> bool:
    """Do results of `node` share storage with what it reads?"""
    read = {compat.storage_key(t) for n in node.all_input_nodes for t in _tensors(n)}
    return any(compat.storage_key(t) in read for t in _tensors(node))


def _tensors(node: fx.Node) -> list[Tensor]:
    return [value for value in compat.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]
