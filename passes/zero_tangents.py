"""Backward without the gradients that never come: those of outputs that are returned beside the loss, scores say.

autograd makes a tensor of zeros for the gradient of an output of which nobody asks it, as large as the output, and the
captured backward adds it to what the loss asks. Without it neither is there.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.analysis.linear import ZERO, degrees
from fxmem.capture import JointGraph
from fxmem.passes.part_graph import PartGraph

aten = torch.ops.aten
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


def tangent_outputs(joint: JointGraph) -> dict[int, fx.Node]:
    """Position of an output among what a call returns -> its tangent; {} where that isn't known of all of them."""
    if joint.mutated_inputs:
        return {}
    named = set(joint.tangents)
    tangents = [node for node in joint.nodes if node.name in named]
    outputs = [getattr(node.meta.get("desc"), "output", None) for node in tangents]
    found = {o.idx: node for o, node in zip(outputs, tangents, strict=True) if isinstance(o, compat.PlainAOTOutput)}
    return found if len(found) == len(tangents) else {}


def without_tangents(joint: JointGraph, outputs: Set[int]) -> JointGraph | None:
    """The graph whose backward reads no gradient of `outputs`: it is zero. They are still taken, with no bytes.

    None where a zero gradient is asked for by more than sums that it adds nothing to.
    """
    if not outputs:
        return joint
    tangents = tangent_outputs(joint)
    seeds = {tangents[i] for i in outputs}
    backward = joint.nodes[joint.num_forward_nodes :]
    known = degrees(joint.nodes, *seeds, degree=ZERO)
    zeros = {node for node in backward if known[node] == ZERO}
    sums = {node: other for node in backward if node not in zeros and (other := _only(node, zeros)) is not None}
    asked = {user for node in zeros for user in node.users} - zeros - set(sums)
    if asked:  # the graph's own output, too: a gradient of zeros
        return None
    nodes = PartGraph(joint)
    values: dict[fx.Node, fx.Node] = {}
    for node in nodes.walk():
        if node in sums:
            values[node] = values[sums[node]]
        elif node not in zeros or node in seeds:
            values[node] = nodes.copy(node, values.__getitem__)
            if node in seeds:
                values[node].meta["val"] = _nothing(node.meta["val"])
    return nodes.finish(fx.map_arg(joint.outputs, values.__getitem__))


def _only(node: fx.Node, zeros: Set[fx.Node]) -> fx.Node | None:
    """What a sum of it and zeros is, if that is one of its terms as it stands."""
    if node.target not in _SUMS or node.kwargs:
        return None
    left, right = node.args[:2]
    if right in zeros:
        other: Any = left
    elif left in zeros and node.target is aten.add.Tensor:
        other = right
    else:
        return None
    values = [n.meta.get("val") for n in (node, other) if isinstance(n, fx.Node)]
    alike = [(v.shape, v.dtype, v.device) for v in values if isinstance(v, torch.Tensor)]
    return other if len(alike) == 2 and alike[0] == alike[1] else None


def _nothing(value: torch.Tensor) -> torch.Tensor:
    assert isinstance(value, compat.FakeTensor)
    return compat.fake_empty(value.fake_mode, (0,), (1,), value.dtype, value.device)
