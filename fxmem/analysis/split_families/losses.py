"""Losses: each element's own, or their sum. A mean has no way: `fxmem.passes.normal_form` makes it a sum."""

from __future__ import annotations

from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Rule, Ways
from fxmem.analysis.split_families.combinators import broadcasting, labelled, letters

aten = torch.ops.aten
NONE, MEAN, SUM = range(3)
"""ATen's codes of the argument `reduction`."""


def nll_loss(call: Call) -> Ways:
    """Scores (N, C, ...) against labels (N, ...). The total weight of a part is that of its own labels."""
    if call["reduction"] == MEAN or call.ndim("target") == 0:
        return ()
    scores, labels = _letters(call)
    return labelled(call, {"self": scores, "target": labels}, [labels if call["reduction"] == NONE else "", ""])


def nll_loss_backward(call: Call) -> Ways:
    """Also of a mean: the total weight is an argument."""
    if call.ndim("target") == 0:
        return ()
    scores, labels = _letters(call)
    gradient = {"grad_output": labels} if call["reduction"] == NONE else {}
    return labelled(call, {"self": scores, "target": labels, **gradient}, [scores])


def _letters(call: Call) -> tuple[str, str]:
    labels = letters(call.ndim("target"))
    return f"{labels[0]}.{labels[1:]}", labels


def elementwise_loss(call: Call) -> Ways:
    if call["reduction"] != SUM:
        return broadcasting(call) if call["reduction"] == NONE else ()
    ndim = max(call.ndim(name) for name in call.tensor_names)
    return labelled(call, {name: letters(ndim)[ndim - call.ndim(name) :] for name in call.tensor_names}, [""])


def elementwise_loss_backward(call: Call) -> Ways:
    return () if call["reduction"] == MEAN else broadcasting(call)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), nll_loss),
    **dict.fromkeys((aten.nll_loss_backward, aten.nll_loss2d_backward), nll_loss_backward),
    **dict.fromkeys((aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss), elementwise_loss),
    **dict.fromkeys((aten.binary_cross_entropy, aten.binary_cross_entropy_with_logits), elementwise_loss),
    **dict.fromkeys((aten.mse_loss_backward, aten.smooth_l1_loss_backward), elementwise_loss_backward),
    **dict.fromkeys((aten.huber_loss_backward, aten.soft_margin_loss_backward), elementwise_loss_backward),
    aten.binary_cross_entropy_backward: elementwise_loss_backward,
}
