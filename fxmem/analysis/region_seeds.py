"""Where it is worth to split: around the ops that need most memory at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from fxmem.analysis.region import Fission, Region, even_offsets, is_tensor, nbytes
from fxmem.analysis.regions import grow
from fxmem.capture import JointGraph

_NUM_OPS = 8


def seeds(joint: JointGraph) -> list[Fission]:
    """Splits in two that leave something in parts, the best first: more bytes inside the region for those at its border.

    Tried are all dims of the largest tensor of each of the ops with the largest working sets (results and arguments),
    with what is at least a third of it; and the first dim of the inputs, with all of the step. Splits with the same ops
    are listed once. For more parts, `replace(fission, offsets=even_offsets(fission.size, num_parts))`.
    """
    found: dict[frozenset[fx.Node], Region] = {}
    for fission in (*_around_large_ops(joint), *_whole_steps(joint)):
        region = grow(joint, fission)
        if not region.refused:
            found.setdefault(frozenset(region.members), region)
    return [region.fission for region in sorted(found.values(), key=_gain, reverse=True)]


def _gain(region: Region) -> float:
    return region.inside_bytes / (region.border_bytes + 1)


def _around_large_ops(joint: JointGraph) -> Iterator[Fission]:
    ops = [node for node in joint.nodes if node.op == "call_function" and is_tensor(node)]
    tensors = [max((op, *op.all_input_nodes), key=nbytes) for op in sorted(ops, key=_working_set, reverse=True)]
    static = set(joint.static_inputs)
    for tensor in list(dict.fromkeys(t for t in tensors if t.name not in static))[:_NUM_OPS]:
        for dim in range(tensor.meta["val"].ndim):
            yield from _in_two(joint, tensor, dim, nbytes(tensor) // 3)


def _whole_steps(joint: JointGraph) -> Iterator[Fission]:
    static = set(joint.static_inputs)
    for node in joint.nodes[: joint.num_forward_nodes]:
        if node.op == "placeholder" and node.name not in static and is_tensor(node) and node.meta["val"].ndim:
            yield from _in_two(joint, node, 0, 0)


def _in_two(joint: JointGraph, tensor: fx.Node, dim: int, min_bytes: int) -> Iterator[Fission]:
    size = tensor.meta["val"].shape[dim]
    if isinstance(size, int) and size > 1:
        yield Fission(joint.nodes.index(tensor), dim, even_offsets(size, 2), min_bytes=min_bytes)


def _working_set(op: fx.Node) -> int:
    tensors = {n for n in (op, *op.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)}
    return sum(map(nbytes, tensors))
