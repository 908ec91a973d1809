"""Losses."""

from __future__ import annotations

from typing import Any

import torch

from tests.analysis.split_cases.draw import Args, Case, Draw

aten = torch.ops.aten


def _nll(dims: int) -> Case:
    def draw(d: Draw) -> Args:
        target_shape = d.sizes(dims) if dims > 1 else d.choose(d.sizes(1), ())
        classes = d.size(2)
        scores = d.dense(*target_shape[:1], classes, *target_shape[1:])
        target = d.ints(classes, *target_shape)
        weight = d.choose(None, d.dense(classes).abs())
        return scores, target, weight, d.choose(2, 0, 1), d.choose(-100, 1)

    return draw


def _nll_backward(op: Any, dims: int) -> Case:
    def draw(d: Draw) -> Args:
        scores, target, weight, reduction, ignore_index = _nll(dims)(d)
        loss, total = op(scores, target, weight, reduction, ignore_index)
        return d.dense(*loss.shape), scores, target, weight, reduction, ignore_index, total

    return draw


def _loss(*options: Any) -> Case:
    def draw(d: Draw) -> Args:
        shape = d.shape()
        return d.floats(*shape).sigmoid(), d.floats(*shape).sigmoid(), d.choose(2, 0, 1), *options

    return draw


def _broadcast_loss(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*d.broadcast(shape)), d.floats(*d.broadcast(shape)), d.choose(2, 0, 1)


def _loss_backward(*options: Any) -> Case:
    def draw(d: Draw) -> Args:
        x, target, reduction = _loss()(d)
        return d.floats(*(x.shape if reduction == 0 else ())), x, target, reduction, *options

    return draw


def _bce(d: Draw) -> Args:
    x, target, reduction = _loss()(d)
    return x, target, d.choose(None, d.floats(*d.broadcast(x.shape))), reduction


def _bce_logits(d: Draw) -> Args:
    x, target, reduction = _loss()(d)
    weights = (d.choose(None, d.floats(*d.broadcast(x.shape))) for _ in range(2))
    return x, target, *weights, reduction


def _bce_backward(d: Draw) -> Args:
    x, target, weight, reduction = _bce(d)
    return d.floats(*(x.shape if reduction == 0 else ())), x, target, weight, reduction


CASES: dict[Any, Case] = {
    aten.nll_loss_forward: _nll(1),
    aten.nll_loss2d_forward: _nll(3),
    aten.nll_loss_backward: _nll_backward(aten.nll_loss_forward, 1),
    aten.nll_loss2d_backward: _nll_backward(aten.nll_loss2d_forward, 3),
    aten.mse_loss: _broadcast_loss,
    **dict.fromkeys((aten.smooth_l1_loss, aten.huber_loss), _loss(0.3)),
    aten.soft_margin_loss: _loss(),
    **dict.fromkeys((aten.smooth_l1_loss_backward, aten.huber_loss_backward), _loss_backward(0.3)),
    **dict.fromkeys((aten.mse_loss_backward, aten.soft_margin_loss_backward), _loss_backward()),
    aten.binary_cross_entropy: _bce,
    aten.binary_cross_entropy_with_logits: _bce_logits,
    aten.binary_cross_entropy_backward: _bce_backward,
}
