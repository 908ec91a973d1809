"""Convolutions, pooling, padding, resampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.analysis.split_cases.draw import Args, Case, Draw

aten = torch.ops.aten


def _convolution(d: Draw) -> Args:
    batch, groups, channels_in, channels_out, num_dims = d.sizes(5, most=3)
    num_dims = min(num_dims, 2)
    transposed = d.flag()
    x = d.floats(batch, groups * channels_in, *d.sizes(num_dims, least=4, most=6))
    outer = (groups * channels_in, channels_out) if transposed else (groups * channels_out, channels_in)
    weight = d.floats(*outer, *d.sizes(num_dims, least=1, most=3))
    bias = d.choose(None, d.floats(groups * channels_out))
    stride, padding, dilation = ([d.size(a, b)] * num_dims for a, b in ((1, 2), (0, 1), (1, 1)))
    return x, weight, bias, stride, padding, dilation, transposed, [0] * num_dims, groups


def _convolution_backward(d: Draw) -> Args:
    x, weight, bias, *options = _convolution(d)
    out = aten.convolution(x, weight, bias, *options)
    sizes = None if bias is None else list(bias.shape)
    return d.floats(*out.shape), x, weight, sizes, *options, [d.flag(), True, bias is not None]


def _image(d: Draw, num_dims: int, least: int = 3) -> Tensor:
    return d.floats(*d.sizes(2 - d.flag() if num_dims < 3 else 2), *d.sizes(num_dims, least=least, most=5))


def _max_pool(num_dims: int) -> Case:
    return lambda d: (_image(d, num_dims), [2] * num_dims, [d.size(1, 2)] * num_dims, [d.size(0, 1)] * num_dims)


def _max_pool_backward(num_dims: int) -> Case:
    op = aten.max_pool2d_with_indices if num_dims == 2 else aten.max_pool3d_with_indices

    def draw(d: Draw) -> Args:
        x, *options = _max_pool(num_dims)(d)
        out, indices = op(x, *options)
        return d.floats(*out.shape), x, *options, [1] * num_dims, False, indices

    return draw


def _avg_pool_backward(num_dims: int) -> Case:
    op = aten.avg_pool2d if num_dims == 2 else aten.avg_pool3d

    def draw(d: Draw) -> Args:
        x, *options = _max_pool(num_dims)(d)
        return d.floats(*op(x, *options).shape), x, *options, False, d.flag(), None

    return draw


def _adaptive_pool(num_dims: int) -> Case:
    return lambda d: (_image(d, num_dims), list(d.sizes(num_dims, most=2)))


def _adaptive_pool_backward(op: Any, num_dims: int) -> Case:
    def draw(d: Draw) -> Args:
        x, size = _adaptive_pool(num_dims)(d)
        result = op(x, size)
        out = result[0] if isinstance(result, tuple) else result
        return d.floats(*out.shape), x, *(result[1:] if isinstance(result, tuple) else ())

    return draw


def _edge_pad(num_dims: int) -> Case:
    return lambda d: (_image(d, num_dims), [d.size(0, 2) for _ in range(2 * num_dims)])


def _edge_pad_backward(op: Any, num_dims: int) -> Case:
    def draw(d: Draw) -> Args:
        x, padding = _edge_pad(num_dims)(d)
        return d.floats(*op(x, padding).shape), x, padding

    return draw


def _upsample(num_dims: int, *options: Any) -> Case:
    return lambda d: (d.floats(*d.sizes(2), *d.sizes(num_dims)), list(d.sizes(num_dims, 1, 6)), *options)


def _upsample_backward(num_dims: int, *options: Any) -> Case:
    def draw(d: Draw) -> Args:
        x, size, *_ = _upsample(num_dims)(d)
        return d.floats(*x.shape[:2], *size), size, list(x.shape), *options

    return draw


def _pixel_shuffle(d: Draw) -> Args:
    return d.floats(*d.shape(0, 2), 4 * d.size(1, 2), *d.sizes(2)), 2


def _pixel_unshuffle(d: Draw) -> Args:
    return d.floats(*d.shape(0, 2), d.size(), 4, 2), 2


def _im2col(d: Draw) -> Args:
    return d.floats(*d.sizes(2), 4, 5), [2, 2], [1, 1], [0, 1], [1, 2]


def _col2im(d: Draw) -> Args:
    batch, channels = d.sizes(2)
    return d.floats(batch, 4 * channels, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]


def _grid_sampler(d: Draw) -> Args:
    batch, channels = d.sizes(2)
    return d.dense(batch, channels, 3, 4), d.dense(batch, *d.sizes(2), 2), d.size(0, 1), 0, d.flag()


def _grid_sampler_backward(d: Draw) -> Args:
    x, grid, *options = _grid_sampler(d)
    return d.dense(*x.shape[:2], *grid.shape[1:3]), x, grid, *options, [True, True]


CASES: dict[Any, Case] = {
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.max_pool2d_with_indices: _max_pool(2),
    aten.max_pool3d_with_indices: _max_pool(3),
    aten.max_pool2d_with_indices_backward: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward: _max_pool_backward(3),
    aten.avg_pool2d: _max_pool(2),
    aten.avg_pool3d: _max_pool(3),
    aten.avg_pool2d_backward: _avg_pool_backward(2),
    aten.avg_pool3d_backward: _avg_pool_backward(3),
    **dict.fromkeys((aten._adaptive_avg_pool2d, aten.adaptive_max_pool2d), _adaptive_pool(2)),
    aten._adaptive_avg_pool3d: _adaptive_pool(3),
    aten._adaptive_avg_pool2d_backward: _adaptive_pool_backward(aten._adaptive_avg_pool2d, 2),
    aten._adaptive_avg_pool3d_backward: _adaptive_pool_backward(aten._adaptive_avg_pool3d, 3),
    aten.adaptive_max_pool2d_backward: _adaptive_pool_backward(aten.adaptive_max_pool2d, 2),
    **dict.fromkeys((aten.reflection_pad1d, aten.replication_pad1d), _edge_pad(1)),
    **dict.fromkeys((aten.reflection_pad2d, aten.replication_pad2d), _edge_pad(2)),
    aten.reflection_pad1d_backward: _edge_pad_backward(aten.reflection_pad1d, 1),
    aten.replication_pad1d_backward: _edge_pad_backward(aten.replication_pad1d, 1),
    aten.reflection_pad2d_backward: _edge_pad_backward(aten.reflection_pad2d, 2),
    aten.replication_pad2d_backward: _edge_pad_backward(aten.replication_pad2d, 2),
    aten.upsample_nearest1d.default: _upsample(1),
    aten.upsample_linear1d.default: _upsample(1, False),
    **dict.fromkeys((aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default), _upsample(2)),
    **dict.fromkeys((aten.upsample_bilinear2d.default, aten.upsample_bicubic2d.default), _upsample(2, True)),
    aten.upsample_nearest3d.default: _upsample(3),
    aten.upsample_trilinear3d.default: _upsample(3, False),
    aten.upsample_nearest1d_backward: _upsample_backward(1),
    aten.upsample_linear1d_backward: _upsample_backward(1, False),
    **dict.fromkeys((aten.upsample_nearest2d_backward, aten._upsample_nearest_exact2d_backward), _upsample_backward(2)),
    **dict.fromkeys((aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward), _upsample_backward(2, True)),
    aten.upsample_nearest3d_backward: _upsample_backward(3),
    aten.upsample_trilinear3d_backward: _upsample_backward(3, False),
    aten.pixel_shuffle: _pixel_shuffle,
    aten.pixel_unshuffle: _pixel_unshuffle,
    aten.im2col: _im2col,
    aten.col2im: _col2im,
    aten.grid_sampler_2d: _grid_sampler,
    aten.grid_sampler_2d_backward: _grid_sampler_backward,
}
