"""Views, and ops that put tensors together or take them apart: what a dim of the result was before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Rule, Size, Ways, expression, is_open, is_same, open_dims
from fxmem.analysis.split_families.combinators import after_removing, aligned, mapped

aten = torch.ops.aten


def view(call: Call) -> Ways:
    """Along the outermost dim of each run of dims that the view merges or takes apart.

    Parts are then runs of elements that follow one another, in the input and in the result. A size that is a node of
    the graph is left for the op to infer, if it is the only one.
    """
    for before, after in _outermost_dims(call.shape_of("self"), call.shape):
        size = call["size"][after]
        if isinstance(size, int) or -1 not in call["size"]:
            way = call.way({"self": before}, after)
            yield way and replace(way, sizes=(("size", after),))


def _outermost_dims(before: Sequence[Size], after: Sequence[Size]) -> Iterator[tuple[int, int]]:
    """The outermost dims of the shortest runs that have as many elements in both shapes; sizes of 1 are left out."""
    starts = [_starts(shape) for shape in (before, after)]
    return ((starts[0][product], starts[1][product]) for product in starts[0] if product in starts[1])


def _starts(shape: Sequence[Size]) -> dict[Any, int]:
    """Number of elements in all dims before a dim -> the dim."""
    dims = list(open_dims(shape))
    products = accumulate((expression(shape[d]) for d in dims), mul, initial=1)
    return dict(zip(products, dims, strict=False))


def permuted(call: Call) -> Ways:
    return mapped(call, {before % call.ndim("self"): after for after, before in enumerate(call["dims"])})


def transposed(call: Call) -> Ways:
    ndim = call.ndim("self")
    a, b = (call[name] % ndim if ndim else 0 for name in ("dim0", "dim1"))
    return mapped(call, {d: {a: b, b: a}.get(d, d) for d in range(ndim)})


def matrix_transposed(call: Call) -> Ways:
    ndim = call.ndim("self")
    return mapped(call, {d: ndim - 1 - d for d in range(ndim)})


def expanded(call: Call) -> Ways:
    """Along dims that were there (of the same size), and along those that are new: the input is whole then."""
    old = call.shape_of("self")
    for dim in open_dims(call.shape):
        before = dim - len(call.shape) + len(old)
        if before < 0 or not is_open(old[before]):
            yield call.way({}, dim, [("size", dim)])
        elif is_same(old[before], call.shape[dim]):
            way = call.way({"self": before}, dim)
            yield way and replace(way, sizes=(("size", dim),))


def unsqueezed(call: Call) -> Ways:
    dim = call["dim"] % len(call.shape)
    return mapped(call, {d: d + (d >= dim) for d in range(call.ndim("self"))})


def squeezed(call: Call) -> Ways:
    """Not along the dims that the op names: a part of size 1 would lose them."""
    old, named = call.shape_of("self"), set(call.dims())
    kept = [d for d, size in enumerate(old) if d not in named or not is_same(size, 1)]
    return mapped(call, {d: kept.index(d) for d in kept if d not in named})


def without_dim(call: Call) -> Ways:
    """`select` and `unbind`: one dim goes, in every result."""
    ndim = call.ndim("self")
    return mapped(call, dict(after_removing(call["dim"] % ndim, ndim)))


def select_backward(call: Call) -> Ways:
    ndim = len(call.shape)
    dims = {after: before for before, after in after_removing(call["dim"] % ndim, ndim)}
    return mapped(call, dims, "grad_output", "input_sizes")


def select_scatter(call: Call) -> Ways:
    ndim = len(call.shape)
    for dim, of_source in after_removing(call["dim"] % ndim, ndim):
        if is_open(call.shape[dim]):
            yield call.way({"self": dim, "src": of_source}, dim)


def other_dims(call: Call) -> Ways:
    """Along every dim that the op doesn't name."""
    ndim = len(call.shape)
    names = [name for name in ("dim", "dims", "dim0", "dim1") if name in call.arguments]
    return aligned(call, {d for name in names for d in call.dims(name, ndim)})


def sliced(call: Call) -> Ways:
    return aligned(call, _cut_dims(call, "self"))


def slice_backward(call: Call) -> Ways:
    return aligned(call, _cut_dims(call, "grad_output"), sizes="input_sizes")


def _cut_dims(call: Call, argument: str) -> list[int]:
    """The dim that is sliced; none if the slice is all of it, as it is of a part then (an end past a part's is its)."""
    (dim,) = call.dims("dim", len(call.shape))
    is_all = call["start"] in (0, None) and call["step"] == 1 and is_same(call.shape_of(argument)[dim], call.shape[dim])
    return [] if is_all else [dim]


def split_apart(call: Call) -> Ways:
    """`split`: several results, of the input's dims."""
    ndim = call.ndim("self")
    return mapped(call, {d: d for d in range(ndim) if d != call["dim"] % ndim})


def concatenated(call: Call) -> Ways:
    """Along the dims in which all tensors are as long as the result; empty vectors, which `cat` skips, are whole."""
    tensors = [t for t in call.tensors_of("tensors") if t is not None]
    is_skipped = [t.ndim == 1 < len(call.shape) and is_same(t.shape[0], 0) for t in tensors]
    kept = [t for t, skipped in zip(tensors, is_skipped, strict=True) if not skipped]
    for dim in open_dims(call.shape):
        if all(is_same(t.shape[dim], call.shape[dim]) for t in kept):
            yield call.way({"tensors": [None if skipped else dim for skipped in is_skipped]}, dim)


def stacked(call: Call) -> Ways:
    ndim = len(call.shape)
    for after, before in after_removing(call["dim"] % ndim, ndim):
        if is_open(call.shape[after]):
            yield call.way({"tensors": before}, after)


def triangle(call: Call) -> Ways:
    ndim = len(call.shape)
    return aligned(call, (ndim - 2, ndim - 1))


def repeated(call: Call) -> Ways:
    """Along dims that are repeated once."""
    num_new = len(call.shape) - call.ndim("self")
    repeats = call["repeats"]
    return mapped(call, {d: d + num_new for d in range(call.ndim("self")) if is_same(repeats[d + num_new], 1)})


def diagonal(call: Call) -> Ways:
    ndim = call.ndim("self")
    taken = {call["dim1"] % ndim, call["dim2"] % ndim}
    return mapped(call, {d: i for i, d in enumerate(d for d in range(ndim) if d not in taken)})


def unfolded(call: Call) -> Ways:
    """Windows over one dim become a new last one."""
    ndim = call.ndim("self")
    return mapped(call, {d: d for d in range(ndim) if d != call["dimension"] % ndim})


def unfold_backward(call: Call) -> Ways:
    ndim = len(call.shape)
    dims = {d: d for d in range(ndim) if d != call["dim"] % ndim}
    return mapped(call, dims, "grad_in", "input_sizes")


def complex_view(call: Call) -> Ways:
    """Real and imaginary parts are the last dim of the real tensor."""
    return mapped(call, {d: d for d in range(min(len(call.shape), call.ndim("self")))})


def padded(call: Call) -> Ways:
    """Along dims to which nothing is added."""
    ndim, pad = len(call.shape), call["pad"]
    return aligned(call, {ndim - 1 - i // 2 for i, amount in enumerate(pad) if not is_same(amount, 0)})


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view), view),
    aten.permute: permuted,
    aten.transpose.int: transposed,
    aten.t: matrix_transposed,
    aten.expand: expanded,
    aten.unsqueeze: unsqueezed,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), squeezed),
    **dict.fromkeys((aten.select.int, aten.unbind.int), without_dim),
    aten.select_backward: select_backward,
    aten.select_scatter: select_scatter,
    aten.slice.Tensor: sliced,
    aten.slice_backward: slice_backward,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes), split_apart),
    **dict.fromkeys((aten.flip, aten.roll, aten.slice_scatter), other_dims),
    aten.cat: concatenated,
    aten.stack: stacked,
    **dict.fromkeys((aten.tril, aten.triu), triangle),
    aten.repeat: repeated,
    aten.diagonal: diagonal,
    aten.constant_pad_nd: padded,
    aten.unfold: unfolded,
    aten.unfold_backward: unfold_backward,
    **dict.fromkeys((aten.view_as_real, aten.view_as_complex), complex_view),
}
