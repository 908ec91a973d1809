"""What data parallelism keeps on the device beside a graph: buckets of DDP, shards of FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fxmem import compat
from fxmem.capture.fakes import modules_of


def parallel_bytes(function: Callable[..., Any]) -> int:
    """Bytes that no parameter, buffer or gradient of `function`'s modules accounts for.

    DDP copies every gradient into a bucket, unless gradients are views of the buckets. While FSDP2 has the whole
    parameters of a module in place, their shards stand beside them.
    """
    return sum(_bucket_bytes(module) + compat.shard_bytes(module) for module in modules_of(function))


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
