"""Reductions and what runs along one dim."""

from __future__ import annotations

from typing import Any

import torch

from tests.analysis.split_cases.draw import Args, Case, Draw, complex_values, copied, with_dim

aten = torch.ops.aten


def _reduced(*extra: Any) -> Case:
    """(x, *extra, dims, keepdim)"""

    def draw(d: Draw) -> Args:
        shape = d.shape()
        return d.floats(*shape), *extra, d.dims(len(shape)), d.flag()

    return draw


def _reduced_one(*extra: Any) -> Case:
    def draw(d: Draw) -> Args:
        x, dim = with_dim(d)
        return x, *extra, dim, d.flag()

    return draw


def _corrected(d: Draw) -> Args:
    shape = d.sizes(d.size(1, 3), least=2)
    return d.floats(*shape), d.choose(d.dims(len(shape)), None), {"correction": d.choose(0, 1), "keepdim": d.flag()}


def _some_dims(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dims(len(shape))


def _aminmax(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, {"dim": d.choose(dim, None), "keepdim": d.flag()}


def _argmax(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, d.choose(dim, None), d.flag()


def _any_dims(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape) > 0, d.choose(d.dims(len(shape)), None), d.flag()


def _norm(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.choose(1, 2, 3.0), d.choose(d.dims(len(shape)), None), d.flag()


def _norm_dims(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.choose(1, 2, 3.0), d.dims(len(shape)), d.flag()


def _sorted(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, dim, d.flag()


def _sorted_stable(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, {"stable": True, "dim": dim, "descending": d.flag()}


def _topk(d: Draw) -> Args:
    x, dim = with_dim(d)
    return x, d.size(1, x.shape[dim]), dim, d.flag()


def _softmax(d: Draw) -> Args:
    return *with_dim(d), False


def _softmax_backward(d: Draw) -> Args:
    x, dim = with_dim(d)
    return d.floats(*x.shape), x.softmax(dim), dim, x.dtype


def _halves(d: Draw) -> Args:
    shape = d.shape()
    dim = d.dim(len(shape))
    return d.floats(*(2 * n if i == dim % len(shape) else n for i, n in enumerate(shape))), dim


def _cross(d: Draw) -> Args:
    shape = list(d.shape())
    dim = d.dim(len(shape))
    shape[dim] = 3
    return d.floats(*shape), d.floats(*shape), {"dim": dim}


CASES: dict[Any, Case] = {
    aten.sum.default: copied,
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax, aten.amin), _reduced()),
    aten.logsumexp: lambda d: ((c := with_dim(d))[0], [c[1]], d.flag()),
    **dict.fromkeys((aten.prod.dim_int, aten.max.dim, aten.min.dim, aten.median.dim, aten.mode), _reduced_one()),
    aten.kthvalue: _reduced_one(1),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _corrected),
    **dict.fromkeys((aten.var_mean.correction, aten.std_mean.correction), _corrected),
    aten.aminmax: _aminmax,
    **dict.fromkeys((aten.argmax, aten.argmin), _argmax),
    aten.count_nonzero.dim_IntList: _some_dims,
    **dict.fromkeys((aten.any.dim, aten.all.dim), lambda d: ((c := with_dim(d))[0] > 0, c[1], d.flag())),
    **dict.fromkeys((aten.any.dims, aten.all.dims), _any_dims),
    aten.linalg_vector_norm: _norm,
    aten.norm.ScalarOpt_dim: _norm_dims,
    **dict.fromkeys((aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin), with_dim),
    aten.sort.default: _sorted,
    aten.sort.stable: _sorted_stable,
    aten.topk: _topk,
    aten._fft_r2c: lambda d: ((x := d.floats(*d.shape())), [d.dim(x.ndim) % x.ndim], 0, d.flag()),
    aten._fft_c2c: lambda d: ((x := complex_values(d)), [d.dim(x.ndim) % x.ndim], 0, d.flag()),
    aten._fft_c2r: lambda d: ((x := complex_values(d)), [x.ndim - 1], 0, 2 * x.shape[-1] - 1),
    aten.glu: _halves,
    aten.glu_backward: lambda d: ((x := _halves(d))[0].chunk(2, x[1])[0].cos(), *x),
    aten.linalg_cross: _cross,
    **dict.fromkeys((aten._softmax, aten._log_softmax), _softmax),
    aten._safe_softmax: with_dim,
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), _softmax_backward),
}
