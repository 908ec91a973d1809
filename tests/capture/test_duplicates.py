"""Equal ops are merged where that takes no more bytes at any time, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fxmem
from fxmem.capture import capture, joint
from fxmem.ir.from_fx import program_from_joint

SIZE = 64


def counts(function: Callable[..., Tensor], target: str) -> int:
    (graph,) = capture(function, (torch.rand(SIZE, SIZE, requires_grad=True),))
    return sum(target in op.target for op in program_from_joint(graph).ops)


class Recomputes(torch.autograd.Function):
    """Its backward computes again what forward did not save."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient * w.abs(), gradient * x * w.sign()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_a_step_without_a_plan_needs_no_more_than_eager_mode() -> None:
    weights = [torch.nn.Parameter(torch.rand(SIZE, SIZE)) for _ in range(6)]

    def step(x: Tensor) -> Tensor:
        for w in weights:
            x = Recomputes.apply(x, w)
        return x.sum()

    x = torch.rand(SIZE, SIZE)

    def measured(function: Callable[..., Tensor]) -> int:
        function(x).backward()
        for w in weights:
            w.grad = None
        return fxmem.measure(lambda: function(x).backward()).peak_bytes

    eager_bytes = measured(step)
    for w in weights:
        w.grad = None
    assert measured(fxmem.compile(step)) <= eager_bytes


def masked(x: Tensor) -> Tensor:
    """Two layers that each make the same mask, which backward reads, from the same table."""
    for _ in range(2):
        mask = torch.arange(SIZE)[:, None] < torch.arange(SIZE)[None, :]
        x = x.exp() * mask
    return x.sum()


def test_tables_of_masks_that_are_saved_anyway_are_made_once() -> None:
    assert counts(masked, "aten.lt") == 1
    assert counts(masked, "aten.arange") == 1, "for the rows and for the columns of the one mask"


def far_apart(x: Tensor) -> Tensor:
    before, x = x.detach(), x.exp()
    y = before.sin().max()
    for _ in range(3):
        x = x.exp()
    return (x * y).sum() * before.sin().min()


def test_what_is_gone_by_then_is_made_again_unless_only_that_keeps_its_argument() -> None:
    assert counts(far_apart, "aten.sin") == 2, "x is an input, so nothing is won by keeping its sine"
    assert counts(lambda x: far_apart(x * 2), "aten.sin") == 1, "the sine instead of what it is made from"


@pytest.mark.parametrize("function", [masked, far_apart, lambda x: far_apart(x * 2)])
def test_merging_takes_no_more_bytes(function: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    args = (torch.rand(SIZE, SIZE, requires_grad=True),)
    merged = fxmem.plan(function, args, device_spec="a100-80g")
    monkeypatch.setattr(joint, "merge_duplicates", lambda graph: None)
    assert merged.peak_bytes <= fxmem.plan(function, args, device_spec="a100-80g").peak_bytes
