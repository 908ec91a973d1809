"""Sample calls of every op that has a split rule: op -> what draws its arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

aten = torch.ops.aten
Args = tuple[Any, ...]


class Draw:
    """Draws sizes, dims and tensors. Tensors are float64 unless `dtype` says otherwise, in any order of strides."""

    def __init__(self, data: st.DataObject, dtype: torch.dtype = torch.float64) -> None:
        self.data, self.dtype = data, dtype

    def size(self, least: int = 1, most: int = 4) -> int:
        simplest = (least + most + 1) // 2  # what hypothesis tries first can be split
        return self.data.draw(st.sampled_from(sorted(range(least, most + 1), key=lambda n: abs(n - simplest))))

    def sizes(self, count: int, least: int = 1, most: int = 4) -> tuple[int, ...]:
        return tuple(self.size(least, most) for _ in range(count))

    def shape(self, least: int = 1, most: int = 4) -> tuple[int, ...]:
        return self.sizes(self.size(least, most))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def choose(self, *options: Any) -> Any:
        return self.data.draw(st.sampled_from(options))

    def dim(self, ndim: int) -> int:
        """One of `ndim`, half of the time counted from the end."""
        return self.size(-ndim, ndim - 1)

    def dims(self, ndim: int) -> list[int]:
        """Some of `ndim`, maybe none; the simplest: the last."""
        subsets = [list(s) for n in range(ndim + 1) for s in itertools.combinations(range(ndim), n)]
        return self.data.draw(st.sampled_from(sorted(subsets, key=lambda s: (s != [ndim - 1], len(s)))))

    def floats(self, *shape: int) -> Tensor:
        order = self.data.draw(st.permutations(range(len(shape))))
        strided = torch.randn([shape[d] for d in order], dtype=self.dtype)
        return strided.permute([order.index(d) for d in range(len(shape))])

    def rows(self, *shape: int) -> Tensor:
        """The last dim's stride is 1."""
        return self.floats(*shape[:-1]).unsqueeze(-1) * self.dense(shape[-1])

    def dense(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape)

    def broadcast(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that is broadcast to `shape`."""
        kept = [self.choose(size, size, 1) for size in shape]
        return tuple(kept[self.choose(0, 0, self.size(0, len(kept))) :])


Case = Callable[[Draw], Args]
"""Draws positional arguments; a trailing dict holds keyword arguments."""


# products


def _mm(d: Draw) -> Args:
    m, k, n = d.sizes(3)
    square = d.floats(m, m)
    return d.choose((d.floats(m, k), d.floats(k, n)), (square, square))


def _addmm(d: Draw) -> Args:
    m, k, n = d.sizes(3)
    return d.floats(*d.broadcast((m, n))), d.floats(m, k), d.floats(k, n), {"beta": 0.5, "alpha": 2}


def _bmm(d: Draw) -> Args:
    b, m, k, n = d.sizes(4)
    return d.floats(b, m, k), d.floats(b, k, n)


def _baddbmm(d: Draw) -> Args:
    b, m, k, n = d.sizes(4)
    return d.floats(*d.broadcast((b, m, n))), d.floats(b, m, k), d.floats(b, k, n)


def _mv(d: Draw) -> Args:
    m, k = d.sizes(2)
    return d.floats(m, k), d.floats(k)


def _addmv(d: Draw) -> Args:
    return d.floats(*d.broadcast((m := d.size(),))), d.floats(m, k := d.size()), d.floats(k)


def _dot(d: Draw) -> Args:
    n = d.size()
    return d.floats(n), d.floats(n)


def _embedding(d: Draw) -> Args:
    rows, width = d.sizes(2)
    return d.floats(rows, width), d.ints(rows, *d.shape(0, 3))


def _embedding_backward(d: Draw) -> Args:
    rows, width = d.sizes(2)
    indices = d.ints(rows, *d.shape(0, 3))
    return d.floats(*indices.shape, width), indices, rows, d.choose(-1, 0), d.choose(False, False, True)


def _attention(d: Draw) -> Args:
    batch, heads, queries, width = d.sizes(4, most=3)
    is_causal = d.flag()
    keys = queries if is_causal else d.size()
    query, key, value = (d.rows(batch, heads, n, width) for n in (queries, keys, keys))
    full = (batch, heads, queries, keys)
    masks = [None, *(shape for shape in itertools.product(*((n, 1) for n in full))), full[2:]]
    shape = None if is_causal else d.choose(*masks)
    options = {} if shape is None else {"attn_mask": d.floats(*shape)}
    return query, key, value, 0.0, is_causal, options


def _attention_backward(d: Draw) -> Args:
    query, key, value, dropout, is_causal, options = _attention(d)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, **options)
    return d.rows(*out.shape), query, key, value, out, lse, dropout, is_causal, options


# views


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


def _with_dim(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dim(len(shape))


def _new_dim(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dim(len(shape) + 1)


def _squeeze_dims(d: Draw) -> Args:
    shape = [d.choose(n, 1) for n in d.shape()]
    return d.floats(*shape), d.dims(len(shape))


def _select(d: Draw) -> Args:
    x, dim = _with_dim(d)
    return x, dim, d.size(-x.shape[dim], x.shape[dim] - 1)


def _select_backward(d: Draw) -> Args:
    x, dim, index = _select(d)
    return x.select(dim, index), list(x.shape), dim, index


def _select_scatter(d: Draw) -> Args:
    x, dim, index = _select(d)
    return x, d.floats(*x.select(dim, index).shape), dim, index


def _slice(d: Draw) -> Args:
    x, dim = _with_dim(d)
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
    x, dim = _with_dim(d)
    return x, d.size(), dim


def _split_with_sizes(d: Draw) -> Args:
    x, dim = _with_dim(d)
    first = d.size(0, x.shape[dim])
    return x, [first, x.shape[dim] - first], dim


def _cat(d: Draw) -> Args:
    x, dim = _with_dim(d)
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


def _complex(d: Draw) -> Tensor:
    return torch.complex(*(d.floats(*shape) for shape in (d.shape(),) * 2))


# elementwise


def _copied(d: Draw) -> Args:
    return (d.floats(*d.shape()),)


def _cast(d: Draw) -> Args:
    return d.floats(*d.shape()), {"dtype": d.choose(torch.float32, torch.int64)}


def _copied_over(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.floats(*d.broadcast(shape))


def _filled_like(d: Draw) -> Args:
    return d.floats(*d.shape()), 2.5


def _created(d: Draw) -> Args:
    return (list(d.shape()),)


def _created_of(d: Draw) -> Args:
    return list(d.shape()), 2.5


def _created_after(d: Draw) -> Args:
    return d.floats(2), list(d.shape())


def _created_after_of(d: Draw) -> Args:
    return d.floats(2), list(d.shape()), 2.5


def _masked_fill(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.floats(*d.broadcast(shape)) > 0, torch.tensor(2.0)


def _prelu(d: Draw) -> Args:
    shape = d.shape(2, 4)
    return d.floats(*shape), d.floats(*[n if i == 1 else 1 for i, n in enumerate(shape)])


def _prelu_backward(d: Draw) -> Args:
    x, weight = _prelu(d)
    return d.floats(*x.shape), x, weight


def _log_sigmoid_backward(d: Draw) -> Args:
    x = d.floats(*d.shape())
    return d.floats(*x.shape), x, aten.log_sigmoid_forward(x)[1]


# reductions


def _reduced(*extra: Any) -> Case:
    """(x, *extra, dims, keepdim)"""

    def draw(d: Draw) -> Args:
        shape = d.shape()
        return d.floats(*shape), *extra, d.dims(len(shape)), d.flag()

    return draw


def _reduced_one(*extra: Any) -> Case:
    def draw(d: Draw) -> Args:
        x, dim = _with_dim(d)
        return x, *extra, dim, d.flag()

    return draw


def _corrected(d: Draw) -> Args:
    shape = d.sizes(d.size(1, 3), least=2)
    return d.floats(*shape), d.choose(d.dims(len(shape)), None), {"correction": d.choose(0, 1), "keepdim": d.flag()}


def _some_dims(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dims(len(shape))


def _aminmax(d: Draw) -> Args:
    x, dim = _with_dim(d)
    return x, {"dim": d.choose(dim, None), "keepdim": d.flag()}


def _argmax(d: Draw) -> Args:
    x, dim = _with_dim(d)
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
    x, dim = _with_dim(d)
    return x, dim, d.flag()


def _sorted_stable(d: Draw) -> Args:
    x, dim = _with_dim(d)
    return x, {"stable": True, "dim": dim, "descending": d.flag()}


def _topk(d: Draw) -> Args:
    x, dim = _with_dim(d)
    return x, d.size(1, x.shape[dim]), dim, d.flag()


def _softmax(d: Draw) -> Args:
    return *_with_dim(d), False


def _softmax_backward(d: Draw) -> Args:
    x, dim = _with_dim(d)
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


# norms


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


# images


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


# indices


def _gather(d: Draw) -> Args:
    x, dim = _with_dim(d)
    shape = [d.size(1, n) if d.choose(False, False, True) else n for n in x.shape]
    shape[dim] = d.size()
    return x, dim, d.ints(x.shape[dim], *shape)


def _index_select(d: Draw) -> Args:
    x, dim = _with_dim(d)
    return x, dim, d.ints(x.shape[dim], d.size())


def _index_source(d: Draw) -> Args:
    x, dim, index = _index_select(d)
    index = torch.randperm(x.shape[dim])[: len(index)]  # which of two rows is written last is not defined
    return x, dim, index, d.floats(*x.index_select(dim, index).shape)


def _index_value(d: Draw) -> Args:
    return *_index_select(d), 2.5


def _scatter(d: Draw) -> Args:
    x, dim, index = _gather(d)
    order = torch.argsort(torch.rand(x.shape), dim)
    index = order[tuple(slice(0, n) for n in index.shape)]
    return x, dim, index, d.floats(*index.shape)


def _scatter_value(d: Draw) -> Args:
    return *_gather(d), 2.5


def _scatter_reduce(d: Draw) -> Args:
    return *_scatter(d), d.choose("sum", "amax")


def _indices(d: Draw, shape: Sequence[int]) -> list[Tensor | None]:
    """Index tensors of shapes that are broadcast together, for some of the dims."""
    common = d.shape(0, 2)
    used = d.dims(len(shape)) or [0]
    indices = [d.ints(n, *d.broadcast(common)) if i in used else None for i, n in enumerate(shape)]
    return indices[: used[-1] + 1]


def _index(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), _indices(d, shape)


def _index_put(d: Draw) -> Args:
    x, indices = _index(d)
    read = aten.index.Tensor(x, indices)
    return x, indices, d.floats(*d.broadcast(read.shape)), True


# losses


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
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.addmv.default: _addmv,
    aten.dot.default: _dot,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    **dict.fromkeys((aten.view.default, aten._unsafe_view), _view),
    aten.permute: _permute,
    aten.transpose.int: _transpose,
    aten.t: lambda d: (d.floats(*d.shape(0, 2)),),
    aten.expand: _expand,
    aten.unsqueeze: _new_dim,
    aten.squeeze.dim: lambda d: (d.floats(*(shape := [d.choose(n, 1) for n in d.shape()])), d.dim(len(shape))),
    aten.squeeze.dims: _squeeze_dims,
    aten.select.int: _select,
    aten.unbind.int: _with_dim,
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
    aten.view_as_real: lambda d: (_complex(d),),
    aten.view_as_complex: lambda d: (d.dense(*d.shape(), 2),),
    **dict.fromkeys((aten.alias, aten.detach, aten.lift_fresh_copy), _copied),
    **dict.fromkeys((aten.zeros_like, aten.ones_like, aten.empty_like), _copied),
    aten._to_copy: _cast,
    aten.copy.default: _copied_over,
    aten.full_like: _filled_like,
    **dict.fromkeys((aten.zeros, aten.ones, aten.empty.memory_format), _created),
    aten.full: _created_of,
    **dict.fromkeys((aten.new_zeros, aten.new_ones, aten.new_empty), _created_after),
    aten.new_full: _created_after_of,
    aten.masked_fill.Tensor: _masked_fill,
    aten.fill.Tensor: lambda d: (d.floats(*d.shape()), torch.tensor(2.0)),
    aten._prelu_kernel: _prelu,
    aten._prelu_kernel_backward: _prelu_backward,
    aten.log_sigmoid_backward: _log_sigmoid_backward,
    aten.sum.default: _copied,
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax, aten.amin), _reduced()),
    aten.logsumexp: lambda d: ((c := _with_dim(d))[0], [c[1]], d.flag()),
    **dict.fromkeys((aten.prod.dim_int, aten.max.dim, aten.min.dim, aten.median.dim, aten.mode), _reduced_one()),
    aten.kthvalue: _reduced_one(1),
    **dict.fromkeys((aten.var.correction, aten.std.correction), _corrected),
    **dict.fromkeys((aten.var_mean.correction, aten.std_mean.correction), _corrected),
    aten.aminmax: _aminmax,
    **dict.fromkeys((aten.argmax, aten.argmin), _argmax),
    aten.count_nonzero.dim_IntList: _some_dims,
    **dict.fromkeys((aten.any.dim, aten.all.dim), lambda d: ((c := _with_dim(d))[0] > 0, c[1], d.flag())),
    **dict.fromkeys((aten.any.dims, aten.all.dims), _any_dims),
    aten.linalg_vector_norm: _norm,
    aten.norm.ScalarOpt_dim: _norm_dims,
    **dict.fromkeys((aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin), _with_dim),
    aten.sort.default: _sorted,
    aten.sort.stable: _sorted_stable,
    aten.topk: _topk,
    aten._fft_r2c: lambda d: ((x := d.floats(*d.shape())), [d.dim(x.ndim) % x.ndim], 0, d.flag()),
    aten._fft_c2c: lambda d: ((x := _complex(d)), [d.dim(x.ndim) % x.ndim], 0, d.flag()),
    aten._fft_c2r: lambda d: ((x := _complex(d)), [x.ndim - 1], 0, 2 * x.shape[-1] - 1),
    aten.glu: _halves,
    aten.glu_backward: lambda d: ((x := _halves(d))[0].chunk(2, x[1])[0].cos(), *x),
    aten.linalg_cross: _cross,
    **dict.fromkeys((aten._softmax, aten._log_softmax), _softmax),
    aten._safe_softmax: _with_dim,
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), _softmax_backward),
    aten.native_layer_norm: _layer_norm,
    aten.native_layer_norm_backward: _layer_norm_backward,
    aten._fused_rms_norm: _rms_norm,
    aten.native_group_norm: _group_norm,
    aten.native_group_norm_backward: _group_norm_backward,
    aten._native_batch_norm_legit_functional: _batch_norm,
    aten._native_batch_norm_legit.no_stats: _batch_norm_no_stats,
    aten._native_batch_norm_legit_no_training: _batch_norm_no_training,
    aten.native_batch_norm_backward: _batch_norm_backward,
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
    aten.gather: _gather,
    aten.index_select: _index_select,
    **dict.fromkeys((aten.index_add, aten.index_copy), _index_source),
    aten.index_fill.int_Scalar: _index_value,
    **dict.fromkeys((aten.scatter.src, aten.scatter_add), _scatter),
    aten.scatter.value: _scatter_value,
    aten.scatter_reduce.two: _scatter_reduce,
    **dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _index_put),
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
"""Op (an overload, or a packet for its default) -> case."""

CUDA_CASES: dict[Any, Case] = {aten._fused_rms_norm_backward: _rms_norm_backward}
"""The same for ops that have a kernel on CUDA only."""
