"""Which regions of a graph are worth trying in parts, and the graph split along them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from fxmem.analysis.region import Region, base_of, is_tensor, nbytes
from fxmem.analysis.regions import grow
from fxmem.capture import JointGraph
from fxmem.capture.joint import target_name
from fxmem.ir.program import Fission, Program
from fxmem.passes.base import run_passes
from fxmem.passes.direct_views import DirectViews
from fxmem.passes.fission import SplitRegions
from fxmem.passes.ignored_rows import IgnoredRows
from fxmem.passes.normal_form import LossNormalForm

LEAST_BYTES = 2**20
"""Smaller values are not split: where they are the largest, memory is not what a step lacks."""
_MOST_PARTS = 16
_FEW_PARTS = 4
_NORMAL_FORM = (IgnoredRows(), DirectViews(), LossNormalForm())
_SHARE = 3  # values below this part of the seed are not drawn into a region around it


def split_graph(joint: JointGraph, fissions: tuple[Fission, ...]) -> JointGraph:
    """`joint` with those regions in parts. Raises VerifyError, PlanMismatch where that can't be."""
    if not fissions:
        return joint
    return run_passes(joint, [*_NORMAL_FORM, SplitRegions(fissions)]).joint


def _normal_form(joint: JointGraph) -> JointGraph:
    """The graph whose nodes seeds are indices of."""
    return run_passes(joint, _NORMAL_FORM).joint


class Candidates:
    """Ways to split a graph that may pay: around its largest value, and the whole step, along the dimension that keeps
    the most bytes inside, in many parts or in few.

    `fissions`: those of the fewest kernels first. `refusals`: why what might have been split can't be.
    """

    def __init__(self, joint: JointGraph, program: Program) -> None:
        self.refusals: list[str] = []
        if program.is_symbolic:
            self.refusals.append("sizes that are symbols are not split")
        is_open = not program.is_symbolic and max(program.nbytes(), default=0) >= LEAST_BYTES
        self._joint = _normal_form(joint) if is_open else joint
        regions = self._regions() if is_open else ()
        found = {r.fission: len(r.members) * r.fission.num_parts for r in regions}
        self.fissions: list[tuple[Fission, ...]] = [(fission,) for fission in sorted(found, key=found.__getitem__)]

    def _regions(self) -> Iterator[Region]:
        sizes = [(nbytes(node), -i) for i, node in enumerate(self._joint.nodes) if _owns_bytes(node)]
        size, at = max(sizes, default=(0, 0))
        if size >= LEAST_BYTES:
            for least_bytes in (size // _SHARE, 0):
                yield from self._forms(-at, least_bytes)

    def _forms(self, seed: int, least_bytes: int) -> Iterator[Region]:
        """Along the best dimension, with gradients in backward, and in forward in many parts and in few."""
        dims = range(self._joint.nodes[seed].meta["val"].ndim)
        regions = [region for dim in dims if (region := self._finest(seed, dim, least_bytes)) is not None]
        best = max(regions, key=lambda region: region.inside_bytes / (1 + region.border_bytes), default=None)
        if best is None:
            return
        yield best
        fission = best.fission
        for num_parts in dict.fromkeys((fission.num_parts, min(_FEW_PARTS, fission.num_parts))):
            coarse = fission.offsets[:: fission.num_parts // num_parts]
            fused = self._grown(replace(fission, offsets=coarse, fuse=True))
            if fused is not None:
                yield fused

    def _finest(self, seed: int, dim: int, least_bytes: int) -> Region | None:
        """The region along `dim` in as many parts as leave it as large as it is in two."""
        size = self._joint.nodes[seed].meta["val"].shape[dim]
        found: Region | None = None
        for num_parts in _numbers_of_parts(size):
            offsets = tuple(size * i // num_parts for i in range(num_parts + 1))
            region = self._grown(Fission(seed, dim, offsets, min_bytes=least_bytes))
            if region is None or region.inside_bytes < region.border_bytes:
                return found
            if found is not None and region.inside_bytes < found.inside_bytes:
                return found
            found = region
        return found

    def _grown(self, fission: Fission) -> Region | None:
        region = grow(self._joint, fission)
        if not region.refused:
            return region
        if region.refused not in self.refusals:
            self.refusals.append(region.refused)
        return None


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
