"""What the cases of all families draw their arguments from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

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


def copied(d: Draw) -> Args:
    return (d.floats(*d.shape()),)


def with_dim(d: Draw) -> Args:
    shape = d.shape()
    return d.floats(*shape), d.dim(len(shape))


def complex_values(d: Draw) -> Tensor:
    return torch.complex(*(d.floats(*shape) for shape in (d.shape(),) * 2))
