"""Dropout as a mask that is drawn at once, and a product with it that can run part by part: the draws stay the same."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxmem.capture import JointGraph
from fxmem.passes.part_graph import PartGraph

aten = torch.ops.aten


def with_masks(joint: JointGraph, dropouts: Sequence[fx.Node]) -> JointGraph:
    """`joint` with each of `dropouts` drawing its mask for a tensor laid out as its input, of which nothing is read.

    Which element gets which random number depends on that layout (on CUDA), so that the mask is the captured one.
    """
    nodes = PartGraph(joint)
    values: dict[fx.Node, fx.Node] = {}
    for node in nodes.walk():
        if node in dropouts:
            _write(nodes, values, node)
        elif node not in values:
            values[node] = nodes.copy(node, values.__getitem__)
    return nodes.finish(fx.map_arg(joint.outputs, values.__getitem__))


def _write(nodes: PartGraph, values: dict[fx.Node, fx.Node], dropout: fx.Node) -> None:
    source: Any = dropout.args[0]
    value, probability = source.meta["val"], dropout.args[1]
    assert isinstance(probability, float)
    picked: dict[Any, fx.Node] = {user.args[1]: user for user in dropout.users}
    names = {i: picked[i].name if i in picked else f"{dropout.name}_{what}" for i, what in enumerate(("out", "mask"))}
    layout, options = (list(value.shape), list(value.stride())), {"dtype": value.dtype, "device": value.device}
    unread = nodes.call(aten.empty_strided.default, layout, f"{dropout.name}_like", dropout, options)
    drawn = nodes.call(dropout.target, (unread, *dropout.args[1:]), dropout.name, dropout)  # type: ignore[arg-type]
    mask = nodes.call(operator.getitem, (drawn, 1), names[1], dropout)
    kept = nodes.call(aten.mul.Tensor, (values[source], mask), f"{dropout.name}_kept", dropout)
    scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
    result = nodes.call(aten.mul.Tensor, (kept, scale), names[0], dropout)
    values |= {user: (result, mask)[index] for index, user in picked.items()}
