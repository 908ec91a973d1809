"""Fake tensors and their modes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _DisableTorchDispatch
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

no_modes = _disable_current_modes


def current_fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode of the compilation in progress, if any."""
    mode: FakeTensorMode | None = detect_fake_mode()
    return mode


def fake_mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode | None:
    """The mode in which a graph was traced: that of the first fake tensor among the values of `nodes`."""
    values = (node.meta.get("val") for node in nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def fake_in_current_mode(value: Any) -> Any:
    """`value`, or its copy in the compilation's FakeTensorMode if it is a FakeTensor of another one.

    Keeps the symbolic dimensions that Dynamo chose for it.
    """
    mode = current_fake_mode()
    if not isinstance(value, FakeTensor) or mode is None or value.fake_mode is mode:
        return value
    tracing = TracingContext.try_get()
    context = tracing.tensor_to_context.get(value) if tracing is not None else None
    source = context.tensor_source if context is not None and hasattr(context, "tensor_source") else None
    return mode.from_tensor(value, symbolic_context=context, source=source)


def fake_empty(
    mode: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A fake tensor with a storage of its own, made without running an op on fake tensors."""
    with _DisableTorchDispatch():
        return FakeTensor(mode, torch.empty_strided(shape, strides, dtype=dtype, device="meta"), device)


def fake_view(base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """A fake tensor over the storage of `base`, one too, made without running an op on fake tensors."""
    assert isinstance(base, FakeTensor)
    with _DisableTorchDispatch():
        empty = torch.empty(0, dtype=base.dtype, device="meta")
        return FakeTensor(base.fake_mode, empty.set_(base.untyped_storage(), offset, shape, strides), base.device)


def fakes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A fake of each tensor, all of one mode and of fixed sizes; fakes are themselves."""
    mode = detect_fake_mode(list(tensors)) or FakeTensorMode(allow_non_fake_inputs=True)
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors]
