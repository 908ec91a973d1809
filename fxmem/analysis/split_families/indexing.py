"""Reading and writing by index tensors: along dims that are not indexed, and along the indices where they only read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fxmem.analysis.split_families.call import Call, Rule, Ways, is_open, open_dims
from fxmem.analysis.split_families.combinators import aligned, broadcast_dims
from fxmem.analysis.split_families.views import other_dims

aten = torch.ops.aten


def gather(call: Call) -> Ways:
    """Along other dims where the input is as long as the index; along `dim` with the input whole."""
    yield from other_dims(call)
    yield from _along_index(call)


def index_select(call: Call) -> Ways:
    dims = call.dims("dim", len(call.shape))
    yield from aligned(call, dims, whole=("index",))
    if dims and is_open(call.shape[dims[0]]):
        yield call.way({"index": 0}, dims[0])


def _along_index(call: Call) -> Ways:
    for dim in call.dims("dim", len(call.shape)):
        if is_open(call.shape[dim]):
            yield call.way({"index": dim}, dim)


def index_written(call: Call) -> Ways:
    """`index_add` and its like: rows of `source` go where the index says, whatever the other dims are."""
    return aligned(call, call.dims("dim", len(call.shape)), whole=("index",))


def index(call: Call) -> Ways:
    """``self[i, j, :, k]``: along dims that are not indexed, and along those of the index tensors."""
    if _has_masks(call):
        return
    num_dims, first = _index_dims(call, len(call.shape) - call.ndim("self"))
    for before, after in _other_dims(call, num_dims, first):
        if is_open(call.shape[after]):
            yield call.way({"self": before}, after)
    index_shape = call.shape[first : first + num_dims]
    for dim in open_dims(index_shape):
        yield call.way(broadcast_dims(call, ["indices"], index_shape, dim) or {}, first + dim)


def index_put(call: Call) -> Ways:
    """Along dims that are not indexed; the values are broadcast to what reading would give."""
    if _has_masks(call):
        return
    num_dims = max(t.ndim for t in call.tensors_of("indices") if t is not None)
    num_indexed = sum(t is not None for t in call.tensors_of("indices"))
    _, first = _index_dims(call, num_dims - num_indexed)
    values = call.shape_of("values")
    ndim = len(call.shape) - num_indexed + num_dims
    for before, after in _other_dims(call, num_dims, first):
        of_values = after - ndim + len(values)
        is_split = of_values >= 0 and is_open(values[of_values])
        if is_open(call.shape[before]):
            yield call.way({"self": before, "values": of_values if is_split else None}, before)


def _has_masks(call: Call) -> bool:
    """Then the size of what is read is not known."""
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in call.tensors_of("indices"))


def _index_dims(call: Call, growth: int) -> tuple[int, int]:
    """How many dims the index tensors have when broadcast, and where these stand in the result.

    `growth`: dims that indexing adds. They stand where the first indexed dim was if the indexed ones are neighbours,
    else in front.
    """
    places = [i for i, t in enumerate(call.tensors_of("indices")) if isinstance(t, Tensor)]
    is_one_group = places[-1] - places[0] == len(places) - 1
    return growth + len(places), places[0] if is_one_group else 0


def _other_dims(call: Call, num_dims: int, first: int) -> Iterator[tuple[int, int]]:
    """(dim of `self`, dim of the result) for dims that are not indexed."""
    indices = call.tensors_of("indices")
    others = [d for d in range(call.ndim("self")) if d >= len(indices) or indices[d] is None]
    return ((d, i if i < first else i + num_dims) for i, d in enumerate(others))


RULES: dict[Any, Rule] = {
    aten.gather: gather,
    aten.index_select: index_select,
    **dict.fromkeys((aten.index_add, aten.index_copy, aten.index_fill.int_Scalar), index_written),
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter_add, aten.scatter_reduce.two), other_dims),
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), index),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), index_put),
}
