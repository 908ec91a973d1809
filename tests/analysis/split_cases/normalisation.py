"""Normalisations."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.analysis.split_cases.draw import Args, Case, Draw

aten = torch.ops.aten


def _layer_norm(d: Draw) -> Args:
    shape = d.shape()
    inner = list(shape[d.size(0, len(shape) - 1) :])
    weight, bias = (d.choose(None, d.dense(*inner)) for _ in range(2))
    return d.floats(*shape), inner, weight, bias, 1e-3


def _layer_norm_backward(d: Draw) -> Args:
    x, inner, weight, bias, eps = _layer_norm(d)
    _, mean, rstd = aten.native_layer_norm(x, inner, weight, bias, eps)
    mask = [d.choose(True, False), weight is not None and d.flag(), bias is not None and d.flag()]
    return d.floats(*x.shape), x, inner, mean, rstd, weight, bias, mask


def _rms_norm(d: Draw) -> Args:
    x, inner, weight, _, eps = _layer_norm(d)
    return x, inner, weight, eps


def _rms_norm_backward(d: Draw) -> Args:
    x, inner, weight, eps = _rms_norm(d)
    _, rstd = aten._fused_rms_norm(x, inner, weight, eps)
    return d.floats(*x.shape), x, inner, rstd, weight, [True, weight is not None]


def _group_norm(d: Draw) -> Args:
    batch, groups, width, *space = d.sizes(d.size(3, 5), most=3)
    x = d.dense(batch, groups * width, *space)
    weight, bias = (d.choose(None, d.dense(groups * width)) for _ in range(2))
    return x, weight, bias, batch, groups * width, math.prod(space), groups, 1e-3


def _group_norm_backward(d: Draw) -> Args:
    x, weight, bias, batch, channels, area, groups, eps = _group_norm(d)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, batch, channels, area, groups, eps)
    mask = [d.choose(True, False), weight is not None, weight is not None]
    return d.dense(*x.shape), x, mean, rstd, weight, batch, channels, area, groups, mask


def _batch_norm(d: Draw) -> Args:
    batch, channels, *space = d.sizes(d.size(2, 4), least=2)
    x = d.floats(batch, channels, *space)
    return x, *(d.dense(channels).abs() for _ in range(4)), d.flag(), 0.1, 1e-3


def _batch_norm_no_stats(d: Draw) -> Args:
    x, weight, bias, *_ = _batch_norm(d)
    return x, weight, bias, True, 0.1, 1e-3


def _batch_norm_no_training(d: Draw) -> Args:
    x, *vectors, _, momentum, eps = _batch_norm(d)
    return x, *vectors, momentum, eps


def _batch_norm_backward(d: Draw) -> Args:
    x, weight, bias, mean, var, training, momentum, eps = _batch_norm(d)
    results = aten._native_batch_norm_legit_functional(x, weight, bias, mean, var, training, momentum, eps)
    mask = [d.choose(True, False), True, True]
    return d.floats(*x.shape), x, weight, mean, var, results[1], results[2], training, eps, mask


CASES: dict[Any, Case] = {
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten._fused_rms_norm: _rms_norm,
    aten.native_group_norm: _group_norm,
    aten.native_group_norm_backward: _group_norm_backward,
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_no_stats,
    aten._native_batch_norm_legit_no_training: _batch_norm_no_training,
    aten.native_batch_norm_backward: _batch_norm_backward,
}

CUDA_CASES: dict[Any, Case] = {aten._fused_rms_norm_backward: _rms_norm_backward}
"""Of ops that have a kernel on CUDA only."""
