"""Fake values of the nodes that a pass makes: their op, run on the fake values of what they read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx


@contextlib.contextmanager
def on_fakes(mode: Any) -> Iterator[None]:
    """Ops as a graph has them: in its fake mode (None: it has none), without autograd or autocast."""
    with mode or contextlib.nullcontext(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def fake_result(target: Callable[..., Any] | str, node: fx.Node, mode: Any) -> Any:
    """What `target` makes of the arguments of `node`."""
    assert callable(target)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with on_fakes(mode):
        return target(*args, **kwargs)
