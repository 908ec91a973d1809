"""Copies, fills, and elementwise ops with arguments of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.analysis.split_cases.draw import Args, Case, Draw, copied

aten = torch.ops.aten


def _cast(d: Draw) -> Args:
    return d.floats(*d.shape()), {"dtype": d.choose(torch.float32, torch.int64)}


def _copied_over(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.floats(*d.broadcast(shape))


def _filled_like(d: Draw) -> Args:
    return d.floats(*d.shape()), 2.5


def _created(d: Draw) -> Args:
    return (list(d.shape()),)


def _created_of(d: Draw) -> Args:
    return list(d.shape()), 2.5


def _created_after(d: Draw) -> Args:
    return d.floats(2), list(d.shape())


def _created_after_of(d: Draw) -> Args:
    return d.floats(2), list(d.shape()), 2.5


def _masked_fill(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.floats(*d.broadcast(shape)) > 0, torch.tensor(2.0)


def _prelu(d: Draw) -> Args:
    shape = d.shape(2, 4)
    return d.floats(*shape), d.floats(*[n if i == 1 else 1 for i, n in enumerate(shape)])


def _prelu_backward(d: Draw) -> Args:
    x, weight = _prelu(d)
    return d.floats(*x.shape), x, weight


def _log_sigmoid_backward(d: Draw) -> Args:
    x = d.floats(*d.shape())
    return d.floats(*x.shape), x, aten.log_sigmoid_forward(x)[1]


CASES: dict[Any, Case] = {
    **dict.fromkeys((aten.alias, aten.detach, aten.lift_fresh_copy), copied),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.empty_like), copied),
    aten._to_copy: _cast,
    aten.copy.default: _copied_over,
    aten.full_like: _filled_like,
    **dict.fromkeys((aten.zeros, aten.ones, aten.empty.memory_format), _created),
    aten.full: _created_of,
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_empty), _created_after),
    aten.new_full: _created_after_of,
    aten.masked_fill.Tensor: _masked_fill,
    aten.fill.Tensor: lambda d: (d.floats(*d.shape()), torch.tensor(2.0)),
    aten._prelu_kernel: _prelu,
    aten._prelu_kernel_backward: _prelu_backward,
    aten.log_sigmoid_backward: _log_sigmoid_backward,
}
