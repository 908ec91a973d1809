"""Tensors that a graph makes, and then writes in place part by part: what makes that the same as making them whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.capture.notes import notes
from fxmem.capture.overwritten import written_args
from fxmem.errors import VerifyError

aten = torch.ops.aten
_ADDS = frozenset({aten.add_.Tensor, aten.addmm_.default, aten.baddbmm_.default})
_VIEWS = frozenset({aten.slice.Tensor, aten.as_strided.default})
_UNINITIALIZED = aten.empty_strided.default


def verify_accumulators(joint: JointGraph) -> None:
    """Who is written part by part is made in this graph, once; is read by nobody before its last part; and gets all.

    Concerns writes that say which op's part they are (`notes`). Raises VerifyError naming the node at fault.
    """
    nodes = _Nodes(joint)
    inputs = _input_storages(joint)
    written: dict[int, list[fx.Node]] = defaultdict(list)
    for node in joint.nodes:
        if _is_part(node):
            for argument in written_args(node):
                written[_storage(argument)].append(node)
    for key, writes in written.items():
        if key in inputs:
            raise VerifyError(f"{writes[0].name} writes a part into an input of the graph")
        _verify(nodes, key, writes)


def writes_own(joint: JointGraph) -> set[fx.Node]:
    """Nodes that write in place, but only into what the graph itself has made."""
    inputs = _input_storages(joint)
    written = ((node, written_args(node)) for node in joint.nodes)
    return {node for node, arguments in written if arguments and inputs.isdisjoint(map(_storage, arguments))}


class _Nodes:
    """Who makes, and who reads, which storage; looked up once."""

    def __init__(self, joint: JointGraph) -> None:
        self.index = {node: i for i, node in enumerate(joint.nodes)}
        self.owner: dict[int, fx.Node] = {}
        self.readers: dict[int, list[fx.Node]] = defaultdict(list)
        storages = {node: compat.storage_keys(node) for node in self.index}
        for node in self.index:
            for key in storages[node]:
                self.owner.setdefault(key, node)
            for key in {key for n in node.all_input_nodes for key in storages[n]}:
                self.readers[key].append(node)


def _verify(nodes: _Nodes, key: int, writes: Sequence[fx.Node]) -> None:
    owner = nodes.owner[key]
    again = next((n for n in (owner, *writes) if "recompute_of" in notes(n)), None)
    if again is not None:
        raise VerifyError(f"{again.name} runs again, and parts are written into {owner.name}")
    for node in nodes.readers[key]:
        if nodes.index[node] < nodes.index[writes[-1]] and not _passes_on(node, key):
            raise VerifyError(f"{node.name} reads {owner.name} before its last part {writes[-1].name} is there")
    for write in writes:
        if any(key in compat.storage_keys(n) for n in write.all_input_nodes if n not in written_args(write)):
            raise VerifyError(f"{write.name} writes into {owner.name} what it reads from it")
    if owner.target is _UNINITIALIZED:
        _verify_filled(owner, writes)
    elif not all(write.target in _ADDS for write in writes):
        raise VerifyError(f"a part of {owner.name} is overwritten, not added to")


def _passes_on(node: fx.Node, key: int) -> bool:
    """Is the node a view of the storage, a pick out of several results, or a write into it?"""
    return node.target in _VIEWS or key in {_storage(argument) for argument in written_args(node)}


def _verify_filled(owner: fx.Node, writes: Sequence[fx.Node]) -> None:
    """Do the writes cover the tensor, each element once?"""
    if any(write.target is not aten.copy_.default for write in writes):
        raise VerifyError(f"something is added to {owner.name}, which holds nothing yet")
    places: list[Any] = [write.args[0] for write in writes]
    if places == [owner]:
        return
    if any(place.target is not aten.slice.Tensor for place in places) or len({place.args[1] for place in places}) != 1:
        raise VerifyError(f"the parts of {owner.name} are not slices along one dim")
    borders = sorted(place.args[2:4] for place in places)
    ends = [0, *(end for _, end in borders)]
    if [start for start, _ in borders] != ends[:-1] or ends[-1] != owner.meta["val"].shape[places[0].args[1]]:
        raise VerifyError(f"the parts of {owner.name} are {borders}: they leave something out, or overlap")


def _is_part(node: fx.Node) -> bool:
    return "part_of" in notes(node)


def _input_storages(joint: JointGraph) -> set[int]:
    return {key for node in joint.nodes if node.op != "call_function" for key in compat.storage_keys(node)}


def _storage(node: fx.Node) -> int:
    return compat.storage_key(node.meta["val"])
