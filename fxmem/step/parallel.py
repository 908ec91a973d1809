"""What data parallelism keeps on the device beside a graph: buckets of DDP, shards of FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fxmem import compat
from fxmem.capture.fakes import modules_of
from fxmem.ir.program import Program

_NUM_LATE = 2


def parallel_bytes(*functions: Callable[..., Any]) -> int:
    """Bytes that no parameter, buffer or gradient of the modules of `functions` accounts for.

    DDP copies every gradient into a bucket, unless gradients are views of the buckets. While FSDP2 has the whole
    parameters of a module in place, their shards stand beside them.
    """
    return sum(_bucket_bytes(module) + compat.shard_bytes(module) for module in modules_of(*functions))


def late_bytes(functions: Iterable[Callable[..., Any]], programs: Iterable[Program]) -> int:
    """Bytes that the threads of a process group may hold after the step has let go of them, at times.

    They are two buffers of collectives: in the graphs, or of FSDP2 around them.
    """
    found = [compat.gathered_bytes(module) for module in modules_of(*functions)]
    for program in programs:
        nbytes = program.nbytes()
        found += [nbytes[s] for op in program.ops if op.is_collective for s in op.storages]
    return _NUM_LATE * max(found, default=0)


def _bucket_bytes(module: nn.Module) -> int:
    if not isinstance(module, nn.parallel.DistributedDataParallel) or module.gradient_as_bucket_view:
        return 0
    return sum(p.nbytes for p in module.parameters() if p.requires_grad)


def why_no_graph(function: Callable[..., Any]) -> str | None:
    """What to say when Dynamo found no graph in a model wrapped by FSDP2; None for others."""
    if not any(compat.is_fully_sharded(module) for module in modules_of(function)):
        return None
    return (
        "FSDP2's hooks run outside of graphs, so that every fully_shard-ed module is a graph of its own, and Dynamo "
        "leaves a module of torch.nn (Sequential) as it is: give the blocks that are sharded a class with a forward, "
        "or fully_shard the whole model only"
    )
