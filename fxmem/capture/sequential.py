"""`torch.utils.checkpoint.checkpoint_sequential` as Dynamo can read it: it skips torch's own and what runs in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


@torch.compiler.substitute_in_graph(checkpoint_sequential)
def _checkpoint_sequential(
    functions: Iterable[Callable[[Any], Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """All segments but the last, which is as long as the rest, are checkpointed."""
    preserves = kwargs.pop("preserve_rng_state", True)
    if kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    layers = list(functions)
    size = len(layers) // segments
    num_checkpointed = size * (segments - 1)
    is_reentrant = use_reentrant is None or use_reentrant
    for start in range(0, num_checkpointed, size):
        segment = _in_turn(layers[start : start + size])
        input = checkpoint(segment, input, use_reentrant=is_reentrant, preserve_rng_state=preserves)
    return _in_turn(layers[num_checkpointed:])(input)


def _in_turn(functions: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def run(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return run
