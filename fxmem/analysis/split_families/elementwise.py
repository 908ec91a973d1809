"""Pointwise ops with broadcasting, copies, and tensors made from nothing but a shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Rule, Ways, open_dims
from fxmem.analysis.split_families.combinators import aligned, broadcasting

aten = torch.ops.aten


def is_pointwise(target: Any) -> bool:
    """Does the op call itself pointwise? Those need no line in the table."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


def filled(call: Call) -> Ways:
    """A tensor of one value, of the shape that the argument `size` says."""
    for dim in open_dims(call.shape):
        yield call.way({}, dim, [("size", dim)])


def filled_alike(call: Call) -> Ways:
    """The same, of the type that `self` has: none of whose elements are read, so that any part of it will do."""
    for way in filled(call):
        yield way
        for dim in open_dims(call.shape_of("self")):
            yield way and replace(way, inputs=(dim,))


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten._to_copy, aten.alias, aten.detach, aten.lift_fresh_copy, aten.copy.default), broadcasting),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like), aligned),
    **dict.fromkeys((aten.full, aten.zeros, aten.ones, aten.empty.memory_format), filled),
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), filled_alike),
    **dict.fromkeys((aten.masked_fill.Tensor, aten.where.ScalarOther, aten.where.ScalarSelf), broadcasting),
    **dict.fromkeys((aten.fill, aten.hardswish, aten.hardswish_backward, aten.hardsigmoid_backward), broadcasting),
    **dict.fromkeys((aten.elu_backward, aten.leaky_relu_backward, aten.hardtanh_backward), broadcasting),
    **dict.fromkeys((aten.mish_backward, aten.softplus_backward, aten.hardshrink_backward), broadcasting),
    **dict.fromkeys((aten.softshrink_backward, aten.log_sigmoid_forward, aten.log_sigmoid_backward), broadcasting),
    **dict.fromkeys((aten.complex, aten.polar, aten.where.Scalar), broadcasting),
    **dict.fromkeys((aten._prelu_kernel, aten._prelu_kernel_backward), broadcasting),
}
