"""`SplitRegions`: ops of a region run part by part, in loops that are written out in the joint graph.

What comes from outside is sliced; what is needed whole is put together by writing each part where it belongs in a
tensor made for it, or added up in place in the first part's result. Each write returns what the next one takes, so that
data flow alone says that readers come after the last part.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import fx

from fxmem.analysis.region import Item, Loop, Region, is_tensor, maker, tensors_made
from fxmem.analysis.region_growth import is_dropout
from fxmem.analysis.regions import grow
from fxmem.analysis.split_rules import part_call, tensor_args
from fxmem.capture import JointGraph
from fxmem.errors import PlanMismatch
from fxmem.ir.program import Fission
from fxmem.passes.base import GraphPass
from fxmem.passes.masks import with_masks
from fxmem.passes.part_graph import PartGraph, shares_storage

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_ADDED_IN_PLACE: dict[Any, Any] = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}


@dataclass(frozen=True)
class SplitRegions(GraphPass):
    """Split the regions of `fissions`, whose seeds are nodes of the graph given: each grows in what the last one left.

    Raises PlanMismatch for one that is refused.
    """

    name: ClassVar[str] = "fission"
    ensures: ClassVar[frozenset[str]] = frozenset({"accumulators"})

    fissions: tuple[Fission, ...]

    def apply(self, joint: JointGraph) -> JointGraph:
        names = [node.name for node in joint.nodes]
        for number, fission in enumerate(self.fissions):
            name = names[fission.seed] if 0 <= fission.seed < len(names) else ""
            seed = next((i for i, node in enumerate(joint.nodes) if node.name == name), -1)
            joint = split_region(joint, grow(joint, replace(fission, seed=seed)), number)
        return joint


def split_region(joint: JointGraph, region: Region, number: int = 0) -> JointGraph:
    """`joint` with `region` (grown in it), noted as that `number`, running part by part. Raises PlanMismatch if it is
    refused."""
    if region.refused:
        raise PlanMismatch(f"can't split: {region.refused}")
    dropouts = [member for member in region.members if is_dropout(member)]
    if dropouts:
        name = joint.nodes[region.fission.seed].name
        joint = with_masks(joint, dropouts)
        seed = [node.name for node in joint.nodes].index(name)
        return split_region(joint, grow(joint, replace(region.fission, seed=seed)), number)
    return _Writer(joint, region, number).write()


class _Writer:
    """`_whole`, `_parts`: a captured node -> what stands for it in the new graph, or for one part of it."""

    def __init__(self, joint: JointGraph, region: Region, number: int) -> None:
        self.joint, self.region, self.number = joint, region, number
        self.offsets, self.size = region.fission.offsets, region.fission.size
        self.num_parts = region.fission.num_parts
        self.nodes = PartGraph(joint)
        self._captured_forward = frozenset(joint.nodes[: joint.num_forward_nodes])
        self._whole: dict[fx.Node, fx.Node] = {}
        self._parts: dict[tuple[fx.Node, int], fx.Node] = {}
        self._slices: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self._growing: dict[fx.Node, fx.Node] = {}  # tensors not all of whose parts are there
        self._late: dict[fx.Node, fx.Node] = {}  # what backward scales, or derives again

    def write(self) -> JointGraph:
        captured, border = self.joint.nodes, self.joint.num_forward_nodes
        self._inputs(captured[:border])
        if self.region.tangent is not None:
            self._whole[self.region.tangent] = self._one(self.region.tangent)
        self._items(self.region.forward)
        num_outputs = self.joint.num_forward_outputs
        results = fx.map_arg(self.joint.outputs[:num_outputs], self._read)
        self.nodes.region = "backward"
        self._inputs(captured[border:])
        for node in captured:
            if node in self.region.scaled:  # before backward makes gradients of its own, that would stand beside both
                self._read(node)
        self._items(self.region.backward)
        gradients = fx.map_arg(self.joint.outputs[num_outputs:], self._read)
        return self.nodes.finish((*results, *gradients))

    def _inputs(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            if node.op != "call_function":
                self._whole[node] = self.nodes.copy(node, self._read)

    def _items(self, items: Sequence[Item]) -> None:
        for item in items:
            if isinstance(item, Loop):
                self._slices.clear()
                for part in range(self.num_parts):
                    for member in item.members:
                        self._member(member, part)
            else:
                self._whole[item] = self.nodes.copy(item, self._read)

    # whole tensors

    def _read(self, node: fx.Node) -> fx.Node:
        """What stands for all of `node` here: in backward, scaled where forward has it for a gradient of 1."""
        is_late, is_derived = self.nodes.region == "backward", maker(node) in self.region.rederived
        if not is_derived and not (is_late and node in self.region.scaled):
            return self._whole[node]
        known = self._late if is_late else self._whole
        if node not in known:
            known[node] = self.nodes.copy(node, self._read) if is_derived else self._scaled(node)
        return known[node]

    def _scaled(self, node: fx.Node) -> fx.Node:
        assert self.region.tangent is not None
        factors = (self._whole[node], self._whole[self.region.tangent])
        return self._laid_out(self.nodes.call(aten.mul.Tensor, factors, f"{node.name}_scaled", node), node)

    def _one(self, tangent: fx.Node) -> fx.Node:
        value = tangent.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        return self.nodes.call(aten.full.default, ([], 1), f"{tangent.name}_one", tangent, options)

    # parts

    def _member(self, op: fx.Node, part: int) -> None:
        """Run `op` for one part, and do with its results what is to be done with them."""
        dims = dict(zip(tensor_args(op), self.region.members[op].inputs, strict=True))
        arguments = {n: self._argument(n, dims.get(n), part) for n in op.all_input_nodes}
        args, kwargs = fx.map_arg(part_call(op, self.region.members[op], self._shrunk(part)), arguments.__getitem__)
        if self._adds_in_place(op, part):
            accumulated = (self._growing[op], *args)
            self._grown(
                op, part, self._call(_ADDED_IN_PLACE[op.target], accumulated, self._sum_name(op, part), op, part)
            )
            return
        made = self._call(op.target, args, f"{op.name}_part{part}", op, part, kwargs)
        for tensor, position in tensors_made(op):
            name = f"{tensor.name}_part{part}"
            picked = made if tensor is op else self._call(operator.getitem, (made, position), name, op, part)
            self._parts[tensor, part] = picked
            if self.region.dims[tensor] == "sum":
                self._add(tensor, part)
            elif tensor in self.region.whole:
                self._put(tensor, part)

    def _argument(self, node: fx.Node, dim: int | None, part: int) -> fx.Node:
        if dim is None:
            return self._read(node)
        if isinstance(self.region.dims.get(node), int):
            return self._parts[node, part]
        key = (node, dim, part)
        if key not in self._slices:
            whole = self._read(node)
            self._slices[key] = self._slice(whole, dim, part, node)
        return self._slices[key]

    def _slice(self, whole: fx.Node, dim: int, part: int, node: fx.Node) -> fx.Node:
        size = node.meta["val"].shape[dim]
        start, end = (size * offset // self.size for offset in self.offsets[part : part + 2])
        return self._call(aten.slice.Tensor, (whole, dim, start, end), f"{node.name}_slice{part}", node, part)

    def _shrunk(self, part: int) -> Any:
        length = self.offsets[part + 1] - self.offsets[part]
        return lambda size: size * length // self.size

    def _call(
        self, target: Any, args: tuple[Any, ...], name: str, source: fx.Node, part: int, kwargs: Any = None
    ) -> fx.Node:
        note: dict[str, Any] = {"part_of": source.name, "part": part, "parts": self.num_parts, "fission": self.number}
        if self.region.tangent is not None:
            note["fused"] = "forward" if source in self._captured_forward else "backward"
        return self.nodes.call(target, args, name, source, kwargs, **note)

    # sums and what is put together

    def _adds_in_place(self, op: fx.Node, part: int) -> bool:
        is_sum = is_tensor(op) and self.region.dims[op] == "sum" and op.meta["val"].dtype not in _HALF
        return is_sum and part > 0 and op.target in _ADDED_IN_PLACE

    def _add(self, tensor: fx.Node, part: int) -> None:
        """Add a part to those before it, the first being the sum so far; half precision adds up in float32."""
        made = self._parts.pop((tensor, part))
        is_half = tensor.meta["val"].dtype in _HALF
        if part > 0:
            made = self._call(
                aten.add_.Tensor, (self._growing[tensor], made), self._sum_name(tensor, part), tensor, part
            )
        elif is_half:
            options = {"dtype": torch.float32}
            made = self._call(aten._to_copy.default, (made,), self._sum_name(tensor, part), tensor, part, options)
        elif shares_storage(made):
            made = self._call(aten.clone.default, (made,), self._sum_name(tensor, part), tensor, part)
        self._grown(tensor, part, made)

    def _put(self, tensor: fx.Node, part: int) -> None:
        """Write a part where it belongs; what stands for the whole is a view of what the write returns."""
        value, dim = tensor.meta["val"], self.region.dims[tensor]
        assert isinstance(dim, int)
        if part == 0:
            self._growing[tensor] = self._empty(tensor)
        place = self._slice(self._growing[tensor], dim, part, tensor)
        made = self._parts[tensor, part]
        written = self._call(aten.copy_.default, (place, made), f"{tensor.name}_copy{part}", tensor, part)
        layout = (written, list(value.shape), list(value.stride()), 0)
        name = tensor.name if part == self.num_parts - 1 else f"{tensor.name}_up_to{part}"
        self._grown(tensor, part, self._call(aten.as_strided.default, layout, name, tensor, part))

    def _sum_name(self, tensor: fx.Node, part: int) -> str:
        """The last sum takes the name of what it stands for, unless it has to be rounded yet."""
        is_last = part == self.num_parts - 1 and tensor.meta["val"].dtype not in _HALF
        return tensor.name if is_last else f"{tensor.name}_sum{part}"

    def _grown(self, tensor: fx.Node, part: int, node: fx.Node) -> None:
        self._growing[tensor] = node
        if part == self.num_parts - 1:
            self._whole[tensor] = self._finished(self._growing.pop(tensor), tensor)

    def _finished(self, node: fx.Node, tensor: fx.Node) -> fx.Node:
        dtype = tensor.meta["val"].dtype
        if node.meta["val"].dtype != dtype:
            node = self.nodes.call(aten._to_copy.default, (node,), tensor.name, tensor, {"dtype": dtype})
        return self._laid_out(node, tensor)

    def _laid_out(self, node: fx.Node, tensor: fx.Node) -> fx.Node:
        """`node`, or a copy of it with the strides that `tensor` has."""
        if node.meta["val"].stride() == tensor.meta["val"].stride():
            return node
        args = (self._empty(tensor), node)
        return self.nodes.call(aten.copy_.default, args, f"{tensor.name}_laid_out", tensor)

    def _empty(self, tensor: fx.Node) -> fx.Node:
        value = tensor.meta["val"]
        shape, options = (list(value.shape), list(value.stride())), {"dtype": value.dtype, "device": value.device}
        return self.nodes.call(aten.empty_strided.default, shape, f"{tensor.name}_empty", tensor, options)
