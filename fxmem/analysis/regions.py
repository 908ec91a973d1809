"""Regions: what of a joint graph can run part by part when one value is split along a batch-like dimension.

A region grows from a seed, forward and backward alike, over ops that `split_rules` has a way for. Parts of different
values belong together: a value whose size along its dim is D is cut at the same fractions as the seed, of size N, so it
may be split iff D * offset is divisible by N for every offset. What the region makes in parts but somebody needs whole
is put together, or added up; what it needs in parts but gets from outside is sliced. An op that needs whole what the
region makes in parts has to wait for the last part: it, and what depends on it, is of the next level.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import fx

from fxmem.analysis.linear import ZERO, degrees
from fxmem.analysis.region import (
    Region,
    base_of,
    described,
    is_getitem,
    is_tensor,
    maker,
    nbytes,
    tensors_made,
)
from fxmem.analysis.region_border import Border, CyclicOrder, ancestors_among, in_order
from fxmem.analysis.region_growth import Growth
from fxmem.capture import JointGraph
from fxmem.capture.effects import is_collective, is_random
from fxmem.capture.overwritten import written_args
from fxmem.ir.program import Fission


def grow(joint: JointGraph, fission: Fission) -> Region:
    """The region of `fission` in `joint`. Where nothing can be split, `refused` says why and nothing else counts."""
    reason = _fault(joint, fission)
    if reason:
        return Region(fission, refused=reason)
    growth = Growth(joint, fission)
    prune(growth, fission.fuse)
    border = Border(growth, fission.fuse)
    region = Region(
        fission,
        members={m: growth.members[m] for m in border.members},
        dims=growth.made,
        levels=border.levels,
        whole=frozenset(border.whole),
        rederived=frozenset(border.rederived),
        blocked=tuple(sorted(growth.blocked, key=growth.index.__getitem__)),
    )
    if not any(map(border.is_in_parts, growth.made)):
        return region.refuse(_nothing_in_parts(joint, region))
    return _ordered(joint, _fused(joint, region, border) if fission.fuse else region, border)


def _fault(joint: JointGraph, fission: Fission) -> str:
    """What is wrong with the seed."""
    nodes = joint.nodes
    if not 0 <= fission.seed < len(nodes) or not is_tensor(nodes[fission.seed]):
        return f"there is no tensor at index {fission.seed}"
    seed, offsets = nodes[fission.seed], fission.offsets
    shape = seed.meta["val"].shape
    if not 0 <= fission.dim < len(shape):
        return f"{described(joint, seed)} has no dimension {fission.dim}"
    size = shape[fission.dim]
    if not isinstance(size, int):
        return f"the size {size} of dimension {fission.dim} of {described(joint, seed)} is not known"
    is_ascending = all(a < b for a, b in pairwise(offsets))
    if len(offsets) < 3 or offsets[0] != 0 or offsets[-1] != size or not is_ascending:
        return f"{offsets} are not the borders of several parts of 0 ... {size}"
    return ""


def prune(growth: Growth, fuse: bool) -> None:
    """Let run whole what gains nothing in parts, and small things that all parts would have to wait for."""
    while True:
        border = Border(growth, fuse)
        dropped = _useless(border) or _small_barrier(border)
        if not dropped:
            return
        growth.drop(dropped)


def _useless(border: Border) -> list[fx.Node]:
    """Members that read nothing in parts, and make nothing that stands in parts only."""
    return [
        member
        for member in border.members
        if not any(in_parts and border.is_own(n) for n, in_parts in border.reads(member))
        and not any(border.is_in_parts(t) for t, _ in tensors_made(member))
    ]


def _small_barrier(border: Border) -> list[fx.Node]:
    """A result that other members wait for, with the members it is made of, where all of that is less than a part.

    The number of labels that count, say: every part's gradient needs it, and it needs all labels.
    """
    growth = border.growth
    limit, inside = part_bytes(growth), growth.members.keys() | growth.made.keys()
    for tensor in sorted(border.whole, key=growth.index.__getitem__):
        if _is_waited_for(border, tensor):
            op = maker(tensor)
            cone = [op, *ancestors_among([op], inside)]
            if sum(nbytes(n) for n in cone if is_tensor(n) and base_of(n) is None) < limit:
                return [n for n in cone if n in growth.members]
    return []


def part_bytes(growth: Growth) -> float:
    """Bytes of a part of the largest tensor that is made in parts."""
    largest = max((nbytes(t) for t, dim in growth.made.items() if isinstance(dim, int)), default=0)
    return largest / growth.fission.num_parts


def _is_waited_for(border: Border, tensor: fx.Node) -> bool:
    """Does a member of the same phase depend on all of `tensor`?"""
    level, is_early = border.levels[maker(tensor)], border.runs_early(maker(tensor))
    below, todo = {tensor}, [tensor]
    while todo:
        for node in todo.pop().users:
            if node in below:
                continue
            if border.levels.get(node, -1) > level and border.runs_early(node) == is_early:
                return True
            below.add(node)
            todo.append(node)
    return False


def _nothing_in_parts(joint: JointGraph, region: Region) -> str:
    first = min(region.blocked, key=lambda node: not _explains(node), default=None)
    return _kept_whole(joint, region, first, "nothing can run part by part")


def obstacle(joint: JointGraph, region: Region) -> str:
    """What keeps a region small: the op next to it that reads and makes most of all that can't run in parts."""

    def weight(node: fx.Node) -> tuple[bool, int]:
        return _explains(node), sum(map(nbytes, {*node.all_input_nodes, *(t for t, _ in tensors_made(node))}))

    return _kept_whole(joint, region, max(region.blocked, key=weight, default=None), "too little stays in parts")


def _kept_whole(joint: JointGraph, region: Region, by: fx.Node | None, otherwise: str) -> str:
    seed = joint.nodes[region.fission.seed]
    what = otherwise if by is None else f"{described(joint, by)} {_why(by)}"
    return f"{what} along dimension {region.fission.dim} of {described(joint, seed)}"


def _explains(node: fx.Node) -> bool:
    return base_of(node) is None if is_tensor(node) else True


def _why(node: fx.Node) -> str:
    if is_random(node):
        return "draws random numbers, so it can't run in parts"
    if is_collective(node):
        return "talks to other processes, so it can't run in parts"
    if "batch_norm" in str(node.target):
        return "takes its statistics over all samples, so it can't run in parts"
    if written_args(node):
        return "writes in place, so it can't run in parts"
    return "can't run in parts"


def _ordered(joint: JointGraph, region: Region, border: Border) -> Region:
    if region.refused:
        return region
    elsewhere = region.members.keys() | region.dims.keys() | region.rederived
    outside = [n for n in joint.nodes if n.op == "call_function" and n not in elsewhere]
    index = border.growth.index
    early = [n for n in outside if index[n] < joint.num_forward_nodes or n in region.early]
    try:
        forward = in_order(border, early, True)
        backward = in_order(border, [n for n in outside if n not in set(early)], False)
    except CyclicOrder as error:
        return region.refuse(f"{described(joint, error.item)} overwrites what parts read before and after it")
    return replace(region, forward=forward, backward=backward)


def _fused(joint: JointGraph, region: Region, border: Border) -> Region:
    """The region with its backward in forward, or refused."""
    nodes = joint.nodes[joint.num_forward_nodes :]
    members = [m for m in region.members if m in set(nodes)]
    needed = ancestors_among(members, set(nodes))
    tangents = [n for n in nodes if n.op == "placeholder" and n in needed]
    if not members or not tangents:
        return region.refuse("no gradient runs through what can be split")
    (tangent, *others) = tangents
    if others or tangent.meta["val"].ndim:
        shown = ", ".join(f"{t.name} {tuple(t.meta['val'].shape)}" for t in tangents)
        return region.refuse(f"its gradient is not a multiple of one number, but comes from {shown}")
    early = needed - region.members.keys() - region.dims.keys() - {tangent}
    early |= {u for n in nodes if n in early and not is_tensor(n) for u in n.users if is_getitem(u)}
    degree = degrees(nodes, tangent)
    fault = _not_proportional(joint, [*early, *members, *(t for m in members for t, _ in tensors_made(m))], degree)
    fault = fault or _too_large(joint, border, early, degree) or _effectful(joint, early)
    if fault:
        return region.refuse(fault)
    made_early = early | region.members.keys() | region.dims.keys()
    late = [n for n in nodes if n not in made_early]
    read = {s for n in late for a in n.all_input_nodes for s in _stands(border, a)}
    read |= {s for r in joint.outputs if isinstance(r, fx.Node) for s in _stands(border, r)}
    scaled = frozenset(t for t in read if t in made_early and degree.get(t) == 1)
    border.rederived |= _views_of(scaled, late)
    return replace(
        region, early=frozenset(early), tangent=tangent, scaled=scaled, rederived=frozenset(border.rederived)
    )


def _views_of(scaled: Collection[fx.Node], nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Views of what is scaled: derived where they are read, they let scaling wait until then."""
    found: set[fx.Node] = set()
    for node in nodes:
        base = base_of(node) if is_tensor(node) and not is_getitem(node) and not written_args(node) else None
        if base is not None and (base in scaled or base in found):
            found.add(node)
    return found


def _stands(border: Border, tensor: fx.Node) -> Iterable[fx.Node]:
    """The tensors from which `tensor` is read: itself, or what it is derived from again."""
    if maker(tensor) in border.rederived:
        return [s for a in maker(tensor).all_input_nodes for s in _stands(border, a)]
    return [tensor]


def _not_proportional(joint: JointGraph, nodes: Iterable[fx.Node], degree: dict[fx.Node, int | None]) -> str:
    for node in sorted(nodes, key=lambda n: n.name):
        if degree[node] not in (0, 1, ZERO):
            return f"{described(joint, node)} is not known to be proportional to the gradient that comes in"
        if degree[node] == 1 and is_tensor(node) and node.meta["val"].dtype is torch.float16:
            return f"{described(joint, node)} is in float16, where gradients are scaled against underflow"
    return ""


def _effectful(joint: JointGraph, early: Iterable[fx.Node]) -> str:
    """Backward may run twice, or after another forward: what it draws, sends or writes has to stay where it is."""
    found = (n for n in early if is_random(n) or is_collective(n) or written_args(n))
    node = min(found, key=lambda n: n.name, default=None)
    return "" if node is None else f"its gradient needs {described(joint, node)}, which has effects, in backward"


def _too_large(joint: JointGraph, border: Border, early: Iterable[fx.Node], degree: dict[fx.Node, int | None]) -> str:
    """Gradients of others than the region would be computed in forward, whole, and nothing be gained."""
    own = [n for n in early if degree[n] == 1 and is_tensor(n) and base_of(n) is None]
    largest = max(own, key=nbytes, default=None)
    if largest is None or sum(map(nbytes, own)) <= part_bytes(border.growth):
        return ""
    return f"its gradient comes from {described(joint, largest)}, which doesn't run in parts"
