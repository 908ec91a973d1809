"""Which regions of a graph are worth trying in parts, and the graph split along them."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.capture import JointGraph
from fxmem.ir.program import Fission, Program

LEAST_BYTES = 2**20
"""Smaller values are not split: where they are the largest, memory is not what a step lacks."""


def split_graph(joint: JointGraph, fissions: tuple[Fission, ...]) -> JointGraph:
    """`joint` with those regions in parts. Raises VerifyError where that can't be."""
    if not fissions:
        return joint
    from fxmem.passes.base import run_passes
    from fxmem.passes.fission import SplitRegions
    from fxmem.passes.normal_form import LossNormalForm

    return run_passes(joint, [LossNormalForm(), SplitRegions(fissions)]).joint


def candidates(joint: JointGraph, program: Program) -> Iterator[tuple[Fission, ...]]:
    yield from ()
