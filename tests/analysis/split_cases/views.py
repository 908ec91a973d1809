"""Views, and copies that only move elements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tests.analysis.split_cases.draw import Args, Case, Draw, complex_values, with_dim

aten = torch.ops.aten


def _view(d: Draw) -> Args:
    """Two ways of merging the dims of one shape."""
    factors = d.sizes(d.size(1, 5), most=3)
    before, after = ([math.prod(run) for run in _runs(d, factors)] for _ in range(2))
    if after and d.flag():
        after[d.size(0, len(after) - 1)] = -1
    return d.dense(*before), after


def _runs(d: Draw, factors: Sequence[int]) -> list[Sequence[int]]:
    cuts = sorted({0, len(factors), *d.dims(len(factors))})
    return [factors[a:b] for a, b in itertools.pairwise(cuts)]


def _permute(d: Draw) -> Args:
    shape = d.shape()
    order = d.data.draw(st.permutations(range(len(shape))))
    return d.floats(*shape), [i - len(shape) * d.flag() for i in order]


def _transpose(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dim(len(shape)), d.dim(len(shape))


def _expand(d: Draw) -> Args:
    new = d.shape()
    old = d.broadcast(new)
    size = [n if o is None or d.flag() else -1 for n, o in zip(new, _kept(old, new), strict=True)]
    return d.floats(*old), size


def _kept(old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """The sizes of `old` that are those of `new`; None for new ones and those of 1 that become another."""
    padded: list[int | None] = [None] * (len(new) - len(old)) + list(old)
    return [o if o == n else None for o, n in zip(padded, new, strict=True)]


def _new_dim(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dim(len(shape) + 1)


def _squeeze_dims(d: Draw) -> Args:
    shape = [d.choose(n, 1) for n in d.shape()]
    return d.floats(*shape), d.dims(len(shape))


def _select(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, dim, d.size(-x.shape[dim], x.shape[dim] - 1)


def _select_backward(d: Draw) -> Args:
    x, dim, index = _select(d)
    return x.select(dim, index), list(x.shape), dim, index


def _select_scatter(d: Draw) -> Args:
    x, dim, index = _select(d)
    return x, d.floats(*x.select(dim, index).shape), dim, index


def _slice(d: Draw) -> Args:
    x, dim = with_dim(d)
    return (
        x,
        dim,
        *d.choose(
            (), (0, 2**63 - 1), (0, x.shape[dim]), (1, 3), (0, -1), (None, 2), (0, 2**63 - 1, 2), (-2, 2**63 - 1)
        ),
    )


def _slice_backward(d: Draw) -> Args:
    x, dim, *rest = _slice(d)
    start, end, step = (*rest, *(0, 2**63 - 1, 1)[len(rest) :])
    start = start or 0
    return aten.slice.Tensor(x, dim, start, end, step), list(x.shape), dim, start, end, step


def _slice_scatter(d: Draw) -> Args:
    x, dim, *rest = _slice(d)
    return x, d.floats(*aten.slice.Tensor(x, dim, *rest).shape), dim, *rest


def _split(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, d.size(), dim


def _split_with_sizes(d: Draw) -> Args:
    x, dim = with_dim(d)
    first = d.size(0, x.shape[dim])
    return x, [first, x.shape[dim] - first], dim


def _cat(d: Draw) -> Args:
    x, dim = with_dim(d)
    shape = list(x.shape)
    shape[dim] = d.size()
    return d.choose([x, d.floats(*shape)], [x, x], [x], [d.dense(0), x], [d.dense(0), x, x]), dim


def _stack(d: Draw) -> Args:
    x, dim = _new_dim(d)
    return d.choose([x, d.floats(*x.shape)], [x, x]), dim


def _flip(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dims(len(shape))


def _roll(d: Draw) -> Args:
    x, dims = _flip(d)
    return x, [1] * max(1, len(dims)), dims


def _matrices(d: Draw) -> Args:
    return (d.floats(*d.shape(2, 4)), d.size(-1, 1))


def _repeat(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), [d.choose(1, 2) for _ in range(len(shape) + d.choose(0, 1))]


def _diagonal(d: Draw) -> Args:
    shape = d.shape(2, 4)
    first, second = d.data.draw(st.permutations(range(len(shape))))[:2]
    return d.floats(*shape), d.size(-1, 1), first, second - len(shape)


def _pad(d: Draw) -> Args:
    shape = d.sizes(d.size(1, 3), least=2)
    return d.floats(*shape), [d.choose(0, 0, 1, -1) for _ in range(2 * d.size(1, len(shape)))], 0.5


def _unfold(d: Draw) -> Args:
    shape = d.sizes(d.size(1, 3), least=3)
    return d.floats(*shape), d.dim(len(shape)), d.size(1, 3), d.size(1, 2)


def _unfold_backward(d: Draw) -> Args:
    x, dim, size, step = _unfold(d)
    return d.floats(*x.unfold(dim, size, step).shape), list(x.shape), dim % x.ndim, size, step


CASES: dict[Any, Case] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view), _view),
    aten.permute: _permute,
    aten.transpose.int: _transpose,
    aten.t: lambda d: (d.floats(*d.shape(0, 2)),),
    aten.expand: _expand,
    aten.unsqueeze: _new_dim,
    aten.squeeze.dim: lambda d: (d.floats(*(shape := [d.choose(n, 1) for n in d.shape()])), d.dim(len(shape))),
    aten.squeeze.dims: _squeeze_dims,
    aten.select.int: _select,
    aten.unbind.int: with_dim,
    aten.select_backward: _select_backward,
    aten.select_scatter: _select_scatter,
    aten.slice.Tensor: _slice,
    aten.slice_backward: _slice_backward,
    aten.slice_scatter: _slice_scatter,
    aten.split.Tensor: _split,
    aten.split_with_sizes: _split_with_sizes,
    aten.cat: _cat,
    aten.stack: _stack,
    aten.flip: _flip,
    aten.roll: _roll,
    **dict.fromkeys((aten.tril, aten.triu), _matrices),
    aten.repeat: _repeat,
    aten.diagonal: _diagonal,
    aten.constant_pad_nd: _pad,
    aten.unfold: _unfold,
    aten.unfold_backward: _unfold_backward,
    aten.view_as_real: lambda d: (complex_values(d),),
    aten.view_as_complex: lambda d: (d.dense(*d.shape(), 2),),
}
