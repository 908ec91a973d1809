"""Graph passes: each applies one part of a plan to the joint graph as FX nodes."""

from fxmem.passes.base import GraphPass, PassResult, run_passes
from fxmem.passes.checkpoint import Checkpoint, apply_plan, rewrite
from fxmem.passes.debug import PassReport
from fxmem.passes.emit import Emitter, emit, emits, region_of

__all__ = [
    "Checkpoint",
    "Emitter",
    "GraphPass",
    "PassReport",
    "PassResult",
    "apply_plan",
    "emit",
    "emits",
    "region_of",
    "rewrite",
    "run_passes",
]
