"""`Call`: what one node of a joint graph computes, with numbers for sizes: enough to run it alone or to estimate it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.errors import VerifyError
from fxmem.ir import sizes


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without values. `owner` tells distinct arguments apart (outputs: distinct storages), in order of
    appearance; `storage_bytes`: of the whole storage it is a view of, as far as metadata knows."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    owner: int
    storage_bytes: int

    @property
    def num_spanned(self) -> int:
        """Elements from the first to the last: what a view with these strides touches at most."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.num_spanned * self.dtype.itemsize

    def meta(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class Call:
    """`target(*args, **kwargs) -> outputs`, tensors replaced by TensorSpec. `outputs` is flat, with None where the op
    returns no tensor."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorSpec | None, ...]

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Distinct tensor arguments."""
        found = (leaf for leaf in compat.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, TensorSpec))
        return tuple({spec.owner: spec for spec in found}.values())

    @property
    def output_tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for spec in self.outputs if spec is not None)

    @cached_property
    def packet(self) -> Any:
        """The op without its overload."""
        return getattr(self.target, "overloadpacket", self.target)

    @property
    def op_name(self) -> str:
        """'embedding' for aten.embedding.default."""
        return str(getattr(self.packet, "__name__", self.packet))

    @property
    def device(self) -> str:
        """Where it runs: the device of its outputs, else of its arguments ('cpu' without tensors)."""
        return next((spec.device for spec in (*self.output_tensors, *self.tensors)), "cpu")

    @property
    def moved_bytes(self) -> int:
        """Bytes of arguments and outputs."""
        return sum(spec.nbytes for spec in (*self.tensors, *self.output_tensors))

    @cached_property
    def key(self) -> str:
        """Equal for calls that cost the same: target, dtypes, shapes, strides, devices, scalars."""
        text = f"{self.target} {_text(self.args)} {_text(dict(self.kwargs))}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def substitute(self, tensors: Mapping[int, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with each TensorSpec replaced by the tensor of its owner."""
        args, kwargs = compat.tree_map_only(
            TensorSpec, lambda spec: tensors[spec.owner], (self.args, dict(self.kwargs))
        )
        return args, kwargs


def _text(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return f"T{value.owner}({value.dtype},{value.shape},{value.stride},{value.device})"
    if isinstance(value, fx.GraphModule):
        return value.code
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{_text(v)}' for k, v in sorted(value.items()))}}}"
    return repr(value)


def call_of(node: fx.Node, hints: Mapping[str, int]) -> Call:
    """The call of a call_function node, size symbols set to `hints`.

    Raises VerifyError when a size has no number, an argument is a graph, or metadata is missing.
    """
    owners: dict[fx.Node, int] = {}

    def argument(arg: fx.Node) -> Any:
        return _describe(arg.meta.get("val"), owners.setdefault(arg, len(owners)), hints, arg)

    args = fx.map_arg(node.args, argument)
    kwargs = fx.map_arg(node.kwargs, argument)
    plain = compat.tree_map_only(
        (torch.SymInt, torch.SymFloat, torch.SymBool), lambda s: _number(s, hints), (args, dict(kwargs))
    )
    return Call(node.target, tuple(plain[0]), plain[1], tuple(_outputs(node.meta.get("val"), hints, node)))


def _outputs(value: Any, hints: Mapping[str, int], node: fx.Node) -> Iterator[TensorSpec | None]:
    storages: dict[int, int] = {}
    for leaf in parts_of(value):
        if isinstance(leaf, torch.Tensor):
            owner = storages.setdefault(compat.storage_key(leaf), len(storages))
            yield _describe(leaf, owner, hints, node)
        else:
            yield None


def parts_of(value: Any) -> Iterator[Any]:
    """Leaves of what an op returns; sparse tensors as the tensors that hold their bytes."""
    for leaf in compat.tree_leaves(value):
        yield from compat.strided_parts(leaf) if isinstance(leaf, torch.Tensor) else (leaf,)


def _describe(value: Any, owner: int, hints: Mapping[str, int], node: fx.Node) -> Any:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        shape, stride = _numbers(value.shape, hints), _numbers(value.stride(), hints)
        nbytes = int(_number(compat.storage_nbytes(value), hints))
        return TensorSpec(shape, stride, value.dtype, str(value.device), owner, nbytes)
    if isinstance(value, (int, float, bool, fx.GraphModule)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(value, hints)
    kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
    raise VerifyError(f"{node.name}: no strided tensor or number in its metadata, but {kind}")


def _numbers(values: Iterable[Any], hints: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(int(_number(v, hints)) for v in values)


def _number(value: Any, hints: Mapping[str, int]) -> Any:
    """A number for `value`, taken from its expression: asking a SymInt itself would guard on it."""
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    size = sizes.plain(value.node.expr)
    if isinstance(value, torch.SymInt) or isinstance(size, int):
        return sizes.evaluate(size, hints)
    return float(size.subs({s: hints[s.name] for s in size.free_symbols if s.name in hints}))
