"""Which regions of a graph are worth trying in parts, and the graph split along them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fxmem.analysis.region import Region, nbytes
from fxmem.analysis.regions import grow
from fxmem.capture import JointGraph
from fxmem.ir.program import Fission, Program
from fxmem.passes.base import run_passes
from fxmem.passes.fission import SplitRegions
from fxmem.passes.normal_form import LossNormalForm

LEAST_BYTES = 2**20
"""Smaller values are not split: where they are the largest, memory is not what a step lacks."""
_MOST_PARTS = 16
_FEW_PARTS = 4
_SHARE = 3  # values below this part of the seed are not drawn into a region around it


def split_graph(joint: JointGraph, fissions: tuple[Fission, ...]) -> JointGraph:
    """`joint` with those regions in parts. Raises VerifyError, PlanMismatch where that can't be."""
    if not fissions:
        return joint
    return run_passes(joint, [LossNormalForm(), SplitRegions(fissions)]).joint


def candidates(joint: JointGraph, program: Program) -> list[tuple[Fission, ...]]:
    """Ways to split the graph that may pay, those of the fewest kernels first: around its largest value, and the whole
    step, along the dimension that keeps the most bytes inside, in many parts or in few."""
    if program.is_symbolic:
        return []
    normal = run_passes(joint, [LossNormalForm()]).joint
    found: dict[tuple[Fission, ...], int] = {}
    for least_bytes, seed in _seeds(normal):
        for region in _forms_of(normal, seed, least_bytes):
            found[region.fission,] = len(region.members) * region.fission.num_parts
    return sorted(found, key=found.__getitem__)


def _seeds(joint: JointGraph) -> list[tuple[int, int]]:
    """(least bytes of what a region takes in, seed): around the largest value, and all of the step."""
    sizes = [(nbytes(node), -i) for i, node in enumerate(joint.nodes) if node.op == "call_function"]
    size, at = max(sizes, default=(0, 0))
    return [(size // _SHARE, -at), (0, -at)] if size >= LEAST_BYTES else []


def _forms_of(joint: JointGraph, seed: int, least_bytes: int) -> Iterator[Region]:
    """Along the best dimension: gradients in forward, in many parts and in few, and with them in backward."""
    regions = [r for dim in range(joint.nodes[seed].meta["val"].ndim) if (r := _finest(joint, seed, dim, least_bytes))]
    best = max(regions, key=lambda region: region.inside_bytes / (1 + region.border_bytes), default=None)
    if best is None:
        return
    yield best
    fission = best.fission
    for num_parts in dict.fromkeys((fission.num_parts, _FEW_PARTS)):
        if fission.num_parts % num_parts == 0:
            coarse = fission.offsets[:: fission.num_parts // num_parts]
            fused = grow(joint, replace(fission, offsets=coarse, fuse=True))
            if not fused.refused:
                yield fused


def _finest(joint: JointGraph, seed: int, dim: int, least_bytes: int) -> Region | None:
    """The region along `dim` in as many parts as leave it as large as it is in two."""
    size = joint.nodes[seed].meta["val"].shape[dim]
    found: Region | None = None
    for num_parts in _numbers_of_parts(size):
        offsets = tuple(size * i // num_parts for i in range(num_parts + 1))
        region = grow(joint, Fission(seed, dim, offsets, min_bytes=least_bytes))
        if region.refused or region.inside_bytes < region.border_bytes:
            return found
        if found is not None and region.inside_bytes < found.inside_bytes:
            return found
        found = region
    return found


def _numbers_of_parts(size: int) -> Iterator[int]:
    num_parts = 2
    while num_parts <= min(size, _MOST_PARTS):
        yield num_parts
        num_parts *= 2
