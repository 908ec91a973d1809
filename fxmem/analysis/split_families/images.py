"""Convolutions, pooling, resampling: along the batch, and along channels where each is on its own."""

from __future__ import annotations

from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Rule, Ways
from fxmem.analysis.split_families.combinators import aligned, labelled

aten = torch.ops.aten


def convolution(call: Call) -> Ways:
    """Along the batch, and (one group, not transposed) along the channels that come out."""
    out = "o" if _has_plain_channels(call) else "."
    return labelled(call, {"input": "b", "weight": out, "bias": out}, [f"b{out}"])


def convolution_backward(call: Call) -> Ways:
    """The gradients of weight and bias are sums over the batch, that of the input one over output channels."""
    out = "o" if _has_plain_channels(call) else "."
    sizes = {"o": [("bias_sizes", 0)]} if call["bias_sizes"] else {}
    return labelled(call, {"grad_output": f"b{out}", "input": "b", "weight": out}, ["b", out, out], sizes)


def _has_plain_channels(call: Call) -> bool:
    return call["groups"] == 1 and not call["transposed"]


def spatial(num_dims: int) -> Rule:
    """All but the last `num_dims` dims of every tensor are batches."""
    return lambda call: aligned(call, _last(call, num_dims))


def spatial_backward(num_dims: int) -> Rule:
    """The same, where the input's shape is an argument."""
    return lambda call: aligned(call, _last(call, num_dims), sizes="input_size")


def _last(call: Call, num_dims: int) -> range:
    ndim = len(call.shape)
    return range(ndim - num_dims, ndim)


def unfolded(call: Call) -> Ways:
    """Between images (N, C, H, W) and columns (N, C * area, positions), of which channels are the outermost."""
    is_batched = call.ndim("self") == (4 if len(call.shape) == 3 else 3)
    return labelled(call, {"self": "bc"}, ["bc"]) if is_batched else ()


def grid_sampler(call: Call) -> Ways:
    return labelled(call, {"input": "bc", "grid": "b"}, ["bc"])


def grid_sampler_backward(call: Call) -> Ways:
    return labelled(call, {"grad_output": "bc", "input": "bc", "grid": "b"}, ["bc", "b"])


RULES: dict[Any, Rule] = {
    aten.convolution: convolution,
    aten.convolution_backward: convolution_backward,
    **dict.fromkeys((aten.max_pool2d_with_indices, aten.max_pool2d_with_indices_backward), spatial(2)),
    **dict.fromkeys((aten.max_pool3d_with_indices, aten.max_pool3d_with_indices_backward), spatial(3)),
    **dict.fromkeys((aten.avg_pool2d, aten.avg_pool2d_backward), spatial(2)),
    **dict.fromkeys((aten.avg_pool3d, aten.avg_pool3d_backward), spatial(3)),
    **dict.fromkeys((aten._adaptive_avg_pool2d, aten._adaptive_avg_pool2d_backward), spatial(2)),
    **dict.fromkeys((aten._adaptive_avg_pool3d, aten._adaptive_avg_pool3d_backward), spatial(3)),
    **dict.fromkeys((aten.adaptive_max_pool2d, aten.adaptive_max_pool2d_backward), spatial(2)),
    **dict.fromkeys((aten.reflection_pad1d, aten.reflection_pad1d_backward), spatial(1)),
    **dict.fromkeys((aten.reflection_pad2d, aten.reflection_pad2d_backward), spatial(2)),
    **dict.fromkeys((aten.replication_pad1d, aten.replication_pad1d_backward), spatial(1)),
    **dict.fromkeys((aten.replication_pad2d, aten.replication_pad2d_backward), spatial(2)),
    **dict.fromkeys((aten.upsample_nearest1d.default, aten.upsample_linear1d.default), spatial(1)),
    **dict.fromkeys((aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default), spatial(2)),
    **dict.fromkeys((aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default), spatial(2)),
    **dict.fromkeys((aten.upsample_nearest3d.default, aten.upsample_trilinear3d.default), spatial(3)),
    **dict.fromkeys((aten.upsample_nearest1d_backward, aten.upsample_linear1d_backward), spatial_backward(1)),
    **dict.fromkeys((aten.upsample_nearest2d_backward, aten._upsample_nearest_exact2d_backward), spatial_backward(2)),
    **dict.fromkeys((aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward), spatial_backward(2)),
    **dict.fromkeys((aten.upsample_nearest3d_backward, aten.upsample_trilinear3d_backward), spatial_backward(3)),
    **dict.fromkeys((aten.pixel_shuffle, aten.pixel_unshuffle), spatial(3)),
    **dict.fromkeys((aten.im2col, aten.col2im), unfolded),
    aten.grid_sampler_2d: grid_sampler,
    aten.grid_sampler_2d_backward: grid_sampler_backward,
}
