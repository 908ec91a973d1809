"""The loss as part of the step: `loss_fn(output, target)`, the target being the last argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def with_loss(model: Callable[..., Any], loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    """`loss_fn(model(*args[:-1], **kwargs), args[-1])` as one callable; `model` itself where there is no loss."""
    if loss_fn is None:
        return model

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(model(*args[:-1], **kwargs), args[-1])

    return step


class WithLoss(nn.Module):
    """The same as a module, for those who need one; the model is its child `model`."""

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._step = with_loss(model, loss_fn)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(*args, **kwargs)
