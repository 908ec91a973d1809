"""A call as the split rules see it: arguments by name, shapes, and the ways that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

Output = int | Literal["sum"] | None
Size = int | torch.SymInt
Path = tuple[str, int | None]
"""Where a size stands among the arguments: the argument's name, and the position in it if it is a list."""


@dataclass(frozen=True)
class Way:
    """One way to run a node part by part.

    `inputs`: per tensor argument, in the order of `tensor_args`, the dim it is sliced along; None: every part takes it
    whole. `outputs`: per item of the result (of an op with one result: one) the dim along which the parts' results are
    parts of the whole one; "sum": they are to be added up; None: no part can make it, or it is no tensor.
    `sizes`: the integer arguments that stand for sizes along split dims (`part_call` shrinks them).
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[Output, ...]
    sizes: tuple[Path, ...] = ()


Ways = Iterable[Way | None]
Rule = Callable[["Call"], Ways]
"""The ways of a call; None stands for one that this call doesn't allow."""
Dims = int | None | Sequence[int | None]
"""A dim for each tensor of an argument; one for all of them, if it is no list."""


def tensor_args(node: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors `node` reads, each once."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]


class Call:
    """A call of an ATen op: its arguments by the names of the schema (defaults filled in), and its results' items."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.tensors = tensor_args(node)
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        given = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
        self.arguments: dict[str, Any] = {a.name: given.get(a.name, a.default_value) for a in schema}
        value = node.meta["val"]
        self.results: tuple[Any, ...] = tuple(value) if isinstance(value, (tuple, list)) else (value,)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the first result."""
        return tuple(self.results[0].shape)

    def tensors_of(self, name: str) -> list[Tensor | None]:
        """The tensors of an argument (one, or those of a list; None for what is no tensor)."""
        value = self.arguments.get(name)
        nodes = value if isinstance(value, (list, tuple)) else [value]
        values = [n.meta.get("val") if isinstance(n, fx.Node) else None for n in nodes]
        return [v if isinstance(v, Tensor) else None for v in values]

    def tensor(self, name: str) -> Tensor | None:
        """The tensor of an argument; None where it is left out."""
        return self.tensors_of(name)[0]

    def shape_of(self, name: str) -> tuple[Size, ...]:
        """Of an argument's tensor; of one that is left out, that of a scalar."""
        tensor = self.tensor(name)
        return () if tensor is None else tuple(tensor.shape)

    def ndim(self, name: str) -> int:
        return len(self.shape_of(name))

    @property
    def tensor_names(self) -> list[str]:
        """The arguments that hold tensors."""
        return [name for name in self.arguments if any(t is not None for t in self.tensors_of(name))]

    def dims(self, name: str = "dim", ndim: int | None = None) -> list[int]:
        """The dims that an argument names (None or none at all: every one), counted from 0 in a tensor of `ndim`."""
        ndim = self.ndim("self") if ndim is None else ndim
        value = self.arguments.get(name)
        listed = [value] if isinstance(value, int) else list(value or ())
        return [d % ndim for d in listed if ndim] if listed else list(range(ndim))

    def way(
        self, inputs: Mapping[str, Dims], outputs: Output | Sequence[Output], sizes: Sequence[Path] = ()
    ) -> Way | None:
        """The way with these dims by argument (whole if not named).

        None if a tensor would have to be split along two dims, or a size is not known.
        """
        found: dict[fx.Node, int | None] = {}
        for name, value in self.arguments.items():
            nodes = value if isinstance(value, (list, tuple)) else [value]
            wanted = inputs.get(name)
            dims = wanted if isinstance(wanted, Sequence) else [wanted] * len(nodes)
            for node, dim in zip(nodes, dims, strict=True):
                if isinstance(node, fx.Node) and found.setdefault(node, dim) != dim:
                    return None
        if any(not isinstance(self.at(path), int) for path in sizes):
            return None
        return Way(tuple(found[t] for t in self.tensors), self._by_item(outputs), tuple(sizes))

    def at(self, path: Path) -> Any:
        """The argument, or an item of it."""
        name, position = path
        return self.arguments[name] if position is None else self.arguments[name][position]

    def _by_item(self, outputs: Output | Sequence[Output]) -> tuple[Output, ...]:
        each = [outputs] * len(self.results) if outputs is None or isinstance(outputs, (int, str)) else outputs
        return tuple(
            output if isinstance(result, Tensor) else None for output, result in zip(each, self.results, strict=True)
        )


def is_same(a: Size, b: Size) -> bool:
    """Are two sizes the same number, whatever their symbols stand for? Adds no guard."""
    return bool(expression(a) == expression(b))


def expression(size: Size) -> Any:
    """A size as a number or a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def is_open(size: Size) -> bool:
    """Can there be several parts along it? A size that is a symbol is at least 2."""
    return isinstance(size, torch.SymInt) or size > 1


def open_dims(shape: Sequence[Size]) -> Iterator[int]:
    return (d for d, size in enumerate(shape) if is_open(size))
