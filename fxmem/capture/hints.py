"""What a model says about its own memory: `keep`, `recompute` (no-ops outside a compilation), torch's checkpoints."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

_KEEP = {"fxmem": "keep"}
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
T = TypeVar("T", bound=Callable[..., Any])


def keep(x: torch.Tensor) -> torch.Tensor:
    """`x` itself; in a compiled step its value is saved for backward, if backward needs it, never recomputed."""
    if not torch.compiler.is_compiling():
        return x
    with fx.traceback.annotate(_KEEP):
        return x.view_as(x)


def recompute(target: T) -> T:
    """`target`, a module (changed in place) or a function, as a checkpointed region of the compiled step.

    Of what it computes inside nothing is saved without a budget; with one the planner is free (docs/0010-hints.md).
    """
    if isinstance(target, nn.Module):
        target.forward = types.MethodType(_again, target)  # which a copy of the module binds to itself
        return target

    @functools.wraps(target)
    def run(*args: Any, **kwargs: Any) -> Any:
        return _run(target, *args, **kwargs)

    return run  # type: ignore[return-value]


def _again(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _run(functools.partial(type(module).forward, module), *args, **kwargs)


def _run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        return function(*args, **kwargs)
    return checkpoint(function, *args, use_reentrant=False, **kwargs)


def is_kept(node: fx.Node) -> bool:
    """Is the value of the forward node to be saved, not recomputed?"""
    named = (node.meta.get("custom") or {}).get("fxmem") == "keep"
    return node.op == "call_function" and (named or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE)


def checkpoint_of(node: fx.Node) -> int | None:
    """The checkpointed region that the forward node lies in, if it is to be recomputed there."""
    region: int | None = node.meta.get("ac_graph_id") if node.meta.get("recompute") in _AGAIN else None
    return region
