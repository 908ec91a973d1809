"""Gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.analysis.split_cases.draw import Args, Case, Draw, with_dim

aten = torch.ops.aten


def _gather(d: Draw) -> Args:
    x, dim = with_dim(d)
    shape = [d.size(1, n) if d.choose(False, False, True) else n for n in x.shape]
    shape[dim] = d.size()
    return x, dim, d.ints(x.shape[dim], *shape)


def _index_select(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, dim, d.ints(x.shape[dim], d.size())


def _index_source(d: Draw) -> Args:
    x, dim, index = _index_select(d)
    index = torch.randperm(x.shape[dim])[: len(index)]  # which of two rows is written last is not defined
    return x, dim, index, d.floats(*x.index_select(dim, index).shape)


def _index_value(d: Draw) -> Args:
    return *_index_select(d), 2.5


def _scatter(d: Draw) -> Args:
    x, dim, index = _gather(d)
    order = torch.argsort(torch.rand(x.shape), dim)
    index = order[tuple(slice(0, n) for n in index.shape)]
    return x, dim, index, d.floats(*index.shape)


def _scatter_value(d: Draw) -> Args:
    return *_gather(d), 2.5


def _scatter_reduce(d: Draw) -> Args:
    return *_scatter(d), d.choose("sum", "amax")


def _indices(d: Draw, shape: Sequence[int]) -> list[Tensor | None]:
    """Index tensors of shapes that are broadcast together, for some of the dims."""
    common = d.shape(0, 2)
    used = d.dims(len(shape)) or [0]
    indices = [d.ints(n, *d.broadcast(common)) if i in used else None for i, n in enumerate(shape)]
    return indices[: used[-1] + 1]


def _index(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), _indices(d, shape)


def _index_put(d: Draw) -> Args:
    x, indices = _index(d)
    read = aten.index.Tensor(x, indices)
    return x, indices, d.floats(*d.broadcast(read.shape)), True


CASES: dict[Any, Case] = {
    aten.gather: _gather,
    aten.index_select: _index_select,
    **dict.fromkeys((aten.index_add, aten.index_copy), _index_source),
    aten.index_fill.int_Scalar: _index_value,
    **dict.fromkeys((aten.scatter.src, aten.scatter_add), _scatter),
    aten.scatter.value: _scatter_value,
    aten.scatter_reduce.two: _scatter_reduce,
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _index_put),
}
