"""Which regions of a graph are worth trying in parts, and the graph split along them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from fxmem import compat
from fxmem.analysis.region import Region, base_of, is_tensor, nbytes
from fxmem.analysis.regions import grow, obstacle
from fxmem.capture import JointGraph
from fxmem.capture.joint import target_name
from fxmem.errors import PlanMismatch
from fxmem.ir.program import Fission, Program
from fxmem.passes.base import run_passes
from fxmem.passes.direct_views import DirectViews
from fxmem.passes.fission import SplitRegions
from fxmem.passes.ignored_rows import IgnoredRows
from fxmem.passes.normal_form import LossNormalForm
from fxmem.units import format_bytes

LEAST_BYTES = 2**20
"""Smaller values are not split: where they are the largest, memory is not what a step lacks."""
_MOST_PARTS = 16
_FEW_PARTS = 4
_MOST_OPS = 30_000  # of all parts: more take minutes to write out and plan
_NORMAL_FORM = (IgnoredRows(), DirectViews(), LossNormalForm())
_MORE = 1.1  # times the bytes inside make another region
_SHARE = 3  # values below this part of the seed are not drawn into a region around it


def split_graph(joint: JointGraph, fissions: tuple[Fission, ...]) -> JointGraph:
    """`joint` with those regions in parts. Raises VerifyError, PlanMismatch where that can't be."""
    if not fissions:
        return joint
    return run_passes(_normal_form(joint), [SplitRegions(fissions)]).joint


def _normal_form(joint: JointGraph) -> JointGraph:
    """The graph whose nodes seeds are indices of."""
    if _NORMAL_FORM not in joint.derived:
        joint.derived[_NORMAL_FORM] = run_passes(joint, _NORMAL_FORM).joint
    return joint.derived[_NORMAL_FORM]


def at_sizes(joint: JointGraph, fissions: tuple[Fission, ...]) -> tuple[Fission, ...]:
    """`fissions` with their borders at the same fractions of the sizes that their seeds have in `joint`, a graph of the
    same ops. Raises PlanMismatch where a seed has no such dimension."""
    nodes = _normal_form(joint).nodes if fissions else []
    return tuple(_at_size(nodes, fission) for fission in fissions)


def _at_size(nodes: list[fx.Node], fission: Fission) -> Fission:
    seed = nodes[fission.seed] if fission.seed < len(nodes) else None
    shape = seed.meta["val"].shape if seed is not None and is_tensor(seed) else ()
    if fission.dim >= len(shape):
        raise PlanMismatch(f"there is no dimension {fission.dim} of node {fission.seed} to split along")
    size = shape[fission.dim]
    return replace(fission, offsets=tuple(size * offset // fission.size for offset in fission.offsets))


class Candidates:
    """Ways to split a graph that may pay: around its largest value, and the whole step, along the dimension that keeps
    the most bytes inside, in many parts or in few.

    `fissions`: those of the fewest kernels first. `refusals`: why what might have been split can't be. `whole`: is the
    whole step among them?
    """

    def __init__(self, joint: JointGraph, program: Program, whole: bool = True) -> None:
        self.refusals: list[str] = []
        self._whole = whole
        if program.is_symbolic:
            self.refusals.append("sizes that are symbols are not split")
        elif max(program.nbytes(), default=0) < LEAST_BYTES:
            self.refusals.append(f"values of less than {format_bytes(LEAST_BYTES)} are not split")
        is_open = not self.refusals
        self._joint = _normal_form(joint) if is_open else joint
        regions = self._regions() if is_open else ()
        found = {r.fission: len(r.members) * r.fission.num_parts for r in regions}
        few = [fission for fission in sorted(found, key=found.__getitem__) if found[fission] <= _MOST_OPS]
        self.fissions: list[tuple[Fission, ...]] = [(fission,) for fission in few]

    def _regions(self) -> Iterator[Region]:
        seed = max(_batched(self._joint), key=nbytes, default=None)
        size = 0 if seed is None else nbytes(seed)
        if seed is not None and size >= LEAST_BYTES:
            index = self._joint.nodes.index(seed)
            around = list(self._forms(index, size // _SHARE))
            yield from around
            if self._whole:
                yield from self._forms(index, 0, around[0] if around else None)

    def _forms(self, seed: int, least_bytes: int, known: Region | None = None) -> Iterator[Region]:
        """Along the best dimension, with gradients in backward, and in forward in many parts and in few; none if they
        are hardly more than `known`."""
        dims = range(self._joint.nodes[seed].meta["val"].ndim)
        regions = [self._finest(seed, dim, least_bytes) for dim in dims]
        found = [region for region in regions if not region.refused]
        if not found:
            self._note(max(regions, key=lambda region: region.inside_bytes, default=None))
            return
        if regions[0].refused:
            self._note(regions[0])  # the batch, mostly
        best = max(found, key=lambda region: region.inside_bytes / (1 + region.border_bytes))
        if known is not None and not _is_more(best, known):
            return
        yield best
        fission = best.fission
        for num_parts in dict.fromkeys((fission.num_parts, min(_FEW_PARTS, fission.num_parts))):
            coarse = fission.offsets[:: fission.num_parts // num_parts]
            fused = grow(self._joint, replace(fission, offsets=coarse, fuse=True))
            if fused.refused:
                self._note(fused)
            else:
                yield fused

    def _finest(self, seed: int, dim: int, least_bytes: int) -> Region:
        """The region along `dim` in as many parts as leave it as large as it is in two; refused if not worth it."""
        size = self._joint.nodes[seed].meta["val"].shape[dim]
        found = Region(Fission(seed, dim, (0, size)), refused=f"dimension {dim} has one element")
        for num_parts in _numbers_of_parts(size):
            offsets = tuple(size * i // num_parts for i in range(num_parts + 1))
            region = grow(self._joint, Fission(seed, dim, offsets, min_bytes=least_bytes))
            if not region.refused and region.inside_bytes < region.border_bytes:
                region = region.refuse(obstacle(self._joint, region))
            if not found.refused and (region.refused or region.inside_bytes < found.inside_bytes):
                return found
            found = region
            if found.refused:
                return found
        return found

    def _note(self, region: Region | None) -> None:
        if region is not None and region.refused not in self.refusals:
            self.refusals.append(region.refused)


def _is_more(region: Region, known: Region) -> bool:
    """Is it worth trying beside `known`, which it contains?"""
    return region.inside_bytes >= _MORE * known.inside_bytes or region.border_bytes < known.border_bytes


def _batched(joint: JointGraph) -> Iterator[fx.Node]:
    """What ops make of the step's arguments, but for gradients that are returned: what may have a batch in it."""
    gradients = (node for node in joint.outputs[joint.num_forward_outputs :] if isinstance(node, fx.Node))
    returned = {key for node in gradients for key in compat.storage_keys(node)}
    static, varying = set(joint.static_inputs), set[fx.Node]()
    for node in joint.nodes:
        is_argument = node.op == "placeholder" and node.name not in static
        if is_argument or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
            if _owns_bytes(node) and returned.isdisjoint(compat.storage_keys(node)):
                yield node


def _owns_bytes(node: fx.Node) -> bool:
    """Does an op make the tensor, and not as a view: expanded, that may seem large and take no memory?"""
    return node.op == "call_function" and is_tensor(node) and base_of(node) is None


def described(joint: JointGraph, fissions: tuple[Fission, ...]) -> list[str]:
    """Each region in words: around which of the model's lines, in how many parts."""
    if not fissions:
        return []
    nodes = _normal_form(joint).nodes
    return [_described(joint, nodes[fission.seed], fission) for fission in fissions]


def _described(joint: JointGraph, seed: fx.Node, fission: Fission) -> str:
    rows = max(b - a for a, b in itertools.pairwise(fission.offsets))
    extent = "what is around it" if fission.min_bytes else "all that it leads to"
    when = ", its gradients in forward" if fission.fuse else ""
    where = f" ({joint.sources[seed.name]})" if seed.name in joint.sources else ""
    return (
        f"{target_name(seed)} {seed.name}{where} and {extent}: {fission.num_parts} parts of up to {rows} along "
        f"dimension {fission.dim}{when}"
    )


def _numbers_of_parts(size: int) -> Iterator[int]:
    num_parts = 2
    while num_parts <= min(size, _MOST_PARTS):
        yield num_parts
        num_parts *= 2
