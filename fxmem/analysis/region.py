"""`Region`: what follows from a `Fission`, the decision to split a value along a dim: facts for planners."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from fxmem import compat
from fxmem.analysis.per_node import per_node
from fxmem.analysis.split_rules import Output, Way
from fxmem.capture import JointGraph
from fxmem.ir.program import Fission


@dataclass(frozen=True, eq=False)
class Loop:
    """The members of one level in one phase: they run for one part, then for the next."""

    level: int
    members: tuple[fx.Node, ...]


Item = fx.Node | Loop


@dataclass(frozen=True)
class Region:
    """What runs part by part, and its border. Nodes are those of the joint graph it was grown in.

    `members`: ops that run part by part, in execution order, each with its way. `dims`: tensors that they make, and
    what becomes of each. `levels`: of each member. `whole`: tensors that members make and that are put together or
    added up, because they are needed whole. `rederived`: ops derived where they are read, views of what is there whole:
    members that are needed whole as well, and of what backward scales. `early`: nodes of backward outside the region
    that its backward needs; with `fuse` they run in forward.
    `tangent`: the incoming gradient that `fuse` replaces by 1. `scaled`: tensors made in forward by `fuse` that are
    proportional to it, and read in backward. `forward`, `backward`: what runs, in order, but for placeholders and
    constants, which come first. `blocked`: ops next to the region without a way. `refused`: why nothing can be split.
    """

    fission: Fission
    members: Mapping[fx.Node, Way] = field(default_factory=dict)
    dims: Mapping[fx.Node, Output] = field(default_factory=dict)
    levels: Mapping[fx.Node, int] = field(default_factory=dict)
    whole: frozenset[fx.Node] = frozenset()
    rederived: frozenset[fx.Node] = frozenset()
    early: frozenset[fx.Node] = frozenset()
    tangent: fx.Node | None = None
    scaled: frozenset[fx.Node] = frozenset()
    forward: tuple[Item, ...] = ()
    backward: tuple[Item, ...] = ()
    blocked: tuple[fx.Node, ...] = ()
    refused: str = ""

    @property
    def num_levels(self) -> int:
        return len(set(self.levels.values()))

    @cached_property
    def inside_bytes(self) -> int:
        """Bytes of the tensors that only ever exist in parts (views counted once more)."""
        return sum(nbytes(v) for v, dim in self.dims.items() if isinstance(dim, int) and v not in self.whole)

    @cached_property
    def border_bytes(self) -> int:
        """Bytes of the tensors that are put together or added up."""
        return sum(map(nbytes, self.whole))

    def refuse(self, reason: str) -> Region:
        """The same region, of which nothing can be split for `reason`."""
        return replace(self, refused=reason)


def nbytes(node: fx.Node) -> int:
    """Bytes of the elements of a tensor, a view counted like any other; 0 for what is none, or of no known size."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return 0
    return value.numel() * value.element_size()


def is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_getitem(node: fx.Node) -> bool:
    """Does the node pick one of an op's several results?"""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and not is_tensor(node.args[0])


def maker(value: fx.Node) -> fx.Node:
    """The op that makes a tensor."""
    while is_getitem(value):
        value = value.args[0]  # type: ignore[assignment]
    return value


def tensors_made(op: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """(tensor, position among the op's results) of what `op` makes; of several results, those that are read."""
    if is_tensor(op):
        yield op, 0
    else:
        yield from ((u, u.args[1]) for u in op.users if is_getitem(u) and is_tensor(u))  # type: ignore[misc]


@per_node
def base_of(value: fx.Node) -> fx.Node | None:
    """The argument that a view shares its storage with; None for what owns its bytes."""
    key = compat.storage_key(value.meta["val"])
    arguments = [n for n in maker(value).all_input_nodes if is_tensor(n)]
    return next((n for n in arguments if compat.storage_key(n.meta["val"]) == key), None)


def described(joint: JointGraph, node: fx.Node) -> str:
    """The op and the model's line, for people."""
    source = joint.sources.get(node.name, "")
    return f"{node.target} ({source})" if source else f"{node.target} ({node.name})"


def can_cut(fission: Fission, size: int | torch.SymInt) -> bool:
    """Do all borders fall between elements of a dim of `size`?"""
    return isinstance(size, int) and all(size * offset % fission.offsets[-1] == 0 for offset in fission.offsets)
