"""A batch as microbatches: how it is split, which shape each part has, and how much each part's loss counts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fxmem import compat
from fxmem.errors import OptionError

Signature: TypeAlias = tuple[Any, ...]
"""Shape and dtype of every tensor of a microbatch, and the other arguments: one graph for each."""

LossWeight: TypeAlias = Literal["mean", "sum"] | Callable[..., Any]
"""How the losses of microbatches add up to the batch's: "mean" weighs by rows, "sum" adds, and a callable is called
with a microbatch's arguments and returns what its loss is a mean over (a number of tokens)."""


@dataclass(frozen=True)
class Microbatch:
    """Arguments of the model for one microbatch. `leaves`: all of them, flat; `num_rows`: its part of the batch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: tuple[Any, ...]
    num_rows: int

    @property
    def signature(self) -> Signature:
        return tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf, str(leaf))
            for leaf in self.leaves
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The leaves that are tensors, in order: the others are constants of the captured graph."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with `tensors` in place of its own."""
        _, build = compat.flatten((self.args, dict(self.kwargs)))
        given = iter(tensors)
        args, kwargs = build([next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves])
        return tuple(args), kwargs


def split_batch(args: Sequence[Any], kwargs: Mapping[str, Any], num_microbatches: int) -> tuple[Microbatch, ...]:
    """Cut every tensor whose first dimension is the batch (that of the first tensor) as evenly as possible.

    Larger parts come first; other arguments go to every microbatch. Raises OptionError when there are fewer rows than
    microbatches, or for an argument that can't be told from another one of its type.
    """
    leaves, build = compat.flatten(((*args,), dict(kwargs)))
    for leaf in leaves:
        if not isinstance(leaf, Tensor | Hashable):
            raise OptionError(f"an argument is a {type(leaf).__name__}: give a tensor, a number, a string or the like")
    batched = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not batched:
        raise OptionError("the arguments hold no tensor with a batch dimension")
    num_rows = batched[0].shape[0]
    if num_rows < num_microbatches:
        raise OptionError(f"a batch of {num_rows} rows can't be {num_microbatches} microbatches")
    columns = [
        torch.tensor_split(leaf, num_microbatches)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == num_rows
        else (leaf,) * num_microbatches
        for leaf in leaves
    ]
    sizes = [len(part) for part in torch.arange(num_rows).tensor_split(num_microbatches)]
    made = []
    for row, size in zip(zip(*columns, strict=True), sizes, strict=True):
        part_args, part_kwargs = build(list(row))
        made.append(Microbatch(tuple(part_args), part_kwargs, tuple(row), size))
    return tuple(made)


def loss_weights(parts: Sequence[Microbatch], weight: LossWeight) -> list[float]:
    """Factor of each microbatch's loss and gradients. Raises OptionError for a weighting that is neither."""
    if weight == "sum":
        return [1.0] * len(parts)
    if weight == "mean":
        counts = [float(part.num_rows) for part in parts]
    elif callable(weight):
        counts = [float(weight(*part.args, **part.kwargs)) for part in parts]
    else:
        raise OptionError(f'loss_weight must be "mean", "sum" or a callable, not {weight!r}')
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
