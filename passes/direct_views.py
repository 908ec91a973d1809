"""`DirectViews`: a view of a view is taken of what is beneath, so that both can be split where either could."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxmem.capture import JointGraph
from fxmem.passes.base import GraphPass
from fxmem.passes.normal_form import Rewriter
from fxmem.passes.part_graph import VIEWS

aten = torch.ops.aten


@dataclass(frozen=True)
class DirectViews(GraphPass):
    """Views of contiguous tensors, other than results of the graph, are made in one step, or in none."""

    name: ClassVar[str] = "direct_views"

    def apply(self, joint: JointGraph) -> JointGraph:
        results = set(joint.outputs)
        origins = {node: _origin(node) for node in joint.nodes if node not in results}
        found = {node: origin for node, origin in origins.items() if origin not in (node, *node.args[:1])}
        if not found:
            return joint
        rewriter = Rewriter(joint)
        for node in rewriter.nodes.walk():
            origin = found.get(node)
            if origin is None:
                rewriter.emit(node)
            elif _shape(origin) == _shape(node):
                rewriter.values[node] = rewriter.values[origin]
            else:
                rewriter.values[node] = rewriter.call(node, aten.view.default, rewriter.new(origin), list(_shape(node)))
        return rewriter.finish()


def _origin(node: fx.Node) -> fx.Node:
    """The tensor that `node` is a view of, or itself."""
    while _is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_view(node: Any) -> bool:
    if not isinstance(node, fx.Node) or node.target not in VIEWS:
        return False
    base = node.args[0].meta["val"]  # type: ignore[union-attr]
    is_known = all(type(size) is int for size in (*base.shape, *node.meta["val"].shape))
    return is_known and bool(base.is_contiguous())


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)
