"""A joint graph written anew, node by node, whose nodes carry fake values that alias as the real ones will."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.capture.notes import META, notes
from fxmem.passes.fakes import Fakes

aten = torch.ops.aten
VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
"""Those that give the elements another shape."""


class PartGraph:
    """`graph`, and how nodes get into it. `region`: of the nodes made from now on, forward ones first.

    A value that is captured stays the same object; whatever else is made is run on fake tensors, so that views share
    the storage of their base, writes in place that of their target, and nothing else shares any.
    """

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.region = "forward"
        self._forward: set[fx.Node] = set()
        self._lines: dict[fx.Node, str] = {}
        self._captured: set[fx.Node] = set()
        self._fakes = Fakes(compat.fake_mode_of(joint.nodes))

    def walk(self) -> Iterator[fx.Node]:
        """The captured nodes one after the other, `region` being that of each."""
        for position, node in enumerate(self.joint.nodes):
            self.region = "forward" if position < self.joint.num_forward_nodes else "backward"
            yield node

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
        name: str | None,
        source: fx.Node,
        kwargs: Mapping[str, Any] | None = None,
        **note: Any,
    ) -> fx.Node:
        """A call that serves `source`, a captured node, whose metadata it takes over; `note`: what META says of it.

        Without a `name` it gets one made of its op's.
        """
        node = self.graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
        node.meta = {**source.meta, META: {**notes(source), **note}}
        self._note(node, source)
        try:
            node.meta["val"] = self._run(node)
        except RuntimeError:
            if target not in VIEWS:
                raise
            self._make_viewable(node, source, note)
        return node

    def finish(self, results: Any) -> JointGraph:
        self.graph.output(results).meta = dict(self.joint.graph_module.graph.output_node().meta)
        self.graph.lint()
        module = compat.module_of_graph(self.joint.graph_module, self.graph, "Joint")
        module.meta = dict(self.joint.graph_module.meta)
        nodes = self.graph.nodes
        return replace(
            self.joint,
            graph_module=module,
            num_forward_nodes=sum(node in self._forward for node in nodes),
            sources={node.name: self._lines[node] for node in nodes if node in self._lines},
        )

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
        if self.region == "forward":
            self._forward.add(node)
        if node.op == "call_function":
            node.meta["partitioner_tag"] = f"is_{self.region}"
        if source.name in self.joint.sources:
            self._lines[node] = self.joint.sources[source.name]

    def _run(self, node: fx.Node) -> Any:
        return self._fakes.of(node)


def shares_storage(node: fx.Node) -> bool:
    """Do results of `node` share storage with what it reads?"""
    own = compat.storage_keys(node)
    return any(own & compat.storage_keys(n) for n in node.all_input_nodes)
