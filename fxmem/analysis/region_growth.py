"""Which ops belong to a region, and the way each of them runs part by part."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Set
from functools import cached_property

import torch
from torch import fx

from fxmem.analysis.region import can_cut, is_getitem, maker, nbytes, tensors_made
from fxmem.analysis.split_rules import Output, Way, tensor_args, ways
from fxmem.capture import JointGraph
from fxmem.ir.program import Fission


class Growth:
    """Spreads from the seed along tensors of at least `min_bytes`, the largest first, to their producers and consumers.

    `members`: op -> way. `dims`: tensor -> the dim that it is split along, also where it comes from outside.
    `made`: tensors that members make -> what becomes of their parts. `blocked`: ops that read a split tensor, or make
    one, and have no way that fits. Nothing here depends on what is only an optimization: see `prune` for that.
    """

    def __init__(self, joint: JointGraph, fission: Fission) -> None:
        self.joint, self.fission = joint, fission
        self.nodes = joint.nodes
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.members: dict[fx.Node, Way] = {}
        self.dims: dict[fx.Node, int] = {}
        self.made: dict[fx.Node, Output] = {}
        self.blocked: dict[fx.Node, None] = {}
        self._queue: list[tuple[int, int, fx.Node]] = []
        self._split(self.nodes[fission.seed], fission.dim)
        self._spread()
        while self._close():
            self._spread()

    def in_order(self) -> list[fx.Node]:
        """Members, in execution order."""
        return sorted(self.members, key=self.index.__getitem__)

    def reads_whole(self, member: fx.Node) -> list[fx.Node]:
        """Tensors that members make and of which `member` needs all parts."""
        dims = zip(tensor_args(member), self.members[member].inputs, strict=True)
        return [t for t, dim in dims if t in self.made and (dim is None or self.made[t] == "sum")]

    def drop(self, ops: Iterable[fx.Node]) -> None:
        """Let `ops` run whole after all."""
        for op in ops:
            del self.members[op]
            for tensor, _ in tensors_made(op):
                self.made.pop(tensor, None)

    def _split(self, tensor: fx.Node, dim: int) -> None:
        self.dims[tensor] = dim
        heapq.heappush(self._queue, (-nbytes(tensor), self.index[tensor], tensor))

    def _spread(self) -> None:
        while self._queue:
            tensor = heapq.heappop(self._queue)[2]
            self._try(maker(tensor))
            if nbytes(tensor) >= self.fission.min_bytes:
                for user in tensor.users:
                    self._try(user)

    def _try(self, op: fx.Node) -> bool:
        """Take `op` in, if there is a way that fits what is split already."""
        if op.op != "call_function" or op in self.members:
            return False
        way = min(self._fitting(op), key=lambda way: self._bytes_whole(op, way), default=None)
        if way is None:
            self.blocked[op] = None
            return False
        self.blocked.pop(op, None)
        self.members[op] = way
        for tensor, position in tensors_made(op):
            self.made[tensor] = way.outputs[position]
        self._note(op, way)
        return True

    def _note(self, op: fx.Node, way: Way) -> None:
        """Split what `op` makes, and what it reads if that is large; small tensors from outside are merely sliced."""
        for tensor, position in tensors_made(op):
            dim = way.outputs[position]
            if isinstance(dim, int) and tensor not in self.dims:
                self._split(tensor, dim)
        for tensor, dim in zip(tensor_args(op), way.inputs, strict=True):
            if isinstance(dim, int) and tensor not in self.dims and nbytes(tensor) >= self.fission.min_bytes:
                self._split(tensor, dim)

    def _fitting(self, op: fx.Node) -> Iterator[Way]:
        """Ways that split what is split already alike, and that touch it."""
        made = dict(tensors_made(op))
        tensors = tensor_args(op)
        for way in ways(op) or _mask_ways(op):
            read = [(t, dim) for t, dim in zip(tensors, way.inputs, strict=True) if dim is not None]
            results = [(t, way.outputs[position]) for t, position in made.items()]
            split = [(t, dim) for t, dim in (*read, *results) if isinstance(dim, int)]
            is_made = all(dim is not None for _, dim in results)
            fits = all(self._fits(t, dim) for t, dim in split) and not any(
                dim == "sum" and t in self.dims for t, dim in results
            )
            if is_made and fits and any(t in self.dims for t, _ in split):
                yield way

    def _fits(self, tensor: fx.Node, dim: int) -> bool:
        return self.dims.get(tensor, dim) == dim and can_cut(self.fission, tensor.meta["val"].shape[dim])

    def _bytes_whole(self, op: fx.Node, way: Way) -> int:
        """Bytes of split tensors that `op` would need whole."""
        dims = zip(tensor_args(op), way.inputs, strict=True)
        return sum(nbytes(t) for t, dim in dims if dim is None and t in self.dims)

    def _close(self) -> bool:
        """Take in what lies between members, however small: outside, it would make some of them wait for others."""
        found = [self._close_among(among) for among in self._phases]
        return any(found)

    def _close_among(self, among: Set[fx.Node]) -> bool:
        below: set[fx.Node] = set()
        for node in self.nodes:
            reads = (n in self.made or n in below for n in node.all_input_nodes)
            if node in among and node not in self.members and node not in self.made and any(reads):
                below.add(node)
        above: set[fx.Node] = set()
        for node in reversed(self.nodes):
            if node in below and any(u in self.members or u in above for u in node.users):
                above.add(node)
        found = [self._try(node) for node in self.nodes if node in above and self._reads_parts(node)]
        return any(found)

    def _reads_parts(self, node: fx.Node) -> bool:
        return not is_getitem(node) and any(isinstance(self.made.get(n), int) for n in tensor_args(node))

    @cached_property
    def _phases(self) -> list[Set[fx.Node]]:
        """Sets of nodes among which waiting costs: between forward and backward the loss is waited for anyhow."""
        late: set[fx.Node] = set()
        tangents = set(self.joint.tangents)
        for node in self.nodes:
            if node.name in tangents or any(n in late for n in node.all_input_nodes):
                late.add(node)
        return [set(self.nodes) - late, late]


def is_dropout(node: fx.Node) -> bool:
    """Is it a dropout whose mask can be drawn whole, before the rest runs in parts: not one of which that is all?"""
    if node.target is not torch.ops.aten.native_dropout.default or node.args[2] is False:
        return False
    return any(position == 0 for _, position in tensors_made(node))


def _mask_ways(op: fx.Node) -> tuple[Way, ...]:
    shape = op.args[0].meta["val"].shape if is_dropout(op) else ()  # type: ignore[union-attr]
    return tuple(Way((d,), (d, d)) for d in range(len(shape)))
