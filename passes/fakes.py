"""Fake values of the nodes that a pass makes: their op, run on the fake values of what they read.

Parts of a split op are alike: `Fakes` runs the first of them, and lays the results of the others out like its.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fxmem import compat

aten = torch.ops.aten
_Look = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]


@contextlib.contextmanager
def on_fakes(mode: Any) -> Iterator[None]:
    """Ops as a graph has them: in its fake mode (None: it has none), without autograd or autocast."""
    with mode or contextlib.nullcontext(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def fake_result(target: Callable[..., Any] | str, node: fx.Node, mode: Any) -> Any:
    """What `target` makes of the arguments of `node`."""
    assert callable(target)
    args, kwargs = _values(node)
    with on_fakes(mode):
        return target(*args, **kwargs)


class Fakes:
    """Results of calls on the fake values of one graph (`mode`: its fake mode).

    What a call makes is known from one before with the same target, other arguments, and tensors that look the same:
    shapes, strides, dtypes, devices. Known is how the results are laid out, and which are views of what is read.
    """

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self._known: dict[Hashable, _Results | None] = {}
        self._looks: dict[fx.Node, _Look | None] = {}

    def of(self, node: fx.Node) -> Any:
        """What the op of `node` makes of its arguments."""
        if node.target is operator.getitem:
            return node.args[0].meta["val"][node.args[1]]  # type: ignore[union-attr]
        if None in map(self._look_of, node.all_input_nodes):
            return fake_result(node.target, node, self._mode)
        if node.target in _VIEWS and not node.kwargs and (view := _VIEWS[node.target](*_values(node)[0])) is not None:
            return view
        tensors: list[Tensor] = []
        key = node.target, self._key(node.args, tensors), self._key(tuple(node.kwargs.items()), tensors)
        known = self._known.get(key)
        if known is not None:
            return known.like(tensors, self._mode)
        made = fake_result(node.target, node, self._mode)
        if key not in self._known:
            self._known[key] = None if node.target in _VIEWS else _noted(made, tensors)
        return made

    def _look_of(self, node: fx.Node) -> _Look | None:
        if node not in self._looks:
            value = node.meta["val"]
            self._looks[node] = _look(value) if isinstance(value, Tensor) else None
        return self._looks[node]

    def _key(self, argument: Any, tensors: list[Tensor]) -> Hashable:
        """An argument with the looks of tensors in place of them, which are noted; 1, 1.0 and True are not the same."""
        if isinstance(argument, fx.Node):
            tensors.append(argument.meta["val"])
            return self._looks[argument]
        if isinstance(argument, (tuple, list)):
            return tuple(self._key(item, tensors) for item in argument)
        return type(argument), argument


@dataclass(frozen=True, slots=True)
class _Result:
    """How a result of a call is laid out; `of`: the argument whose storage it shares, `offset` elements on."""

    look: _Look
    of: int | None = None
    offset: int = 0
    is_same: bool = False

    def like(self, tensors: Sequence[Tensor], mode: Any) -> Tensor:
        shape, strides, dtype, device = self.look
        if self.of is None:
            return compat.fake_empty(mode, shape, strides, dtype, device)
        base = tensors[self.of]
        offset = int(base.storage_offset()) + self.offset
        return base if self.is_same else compat.fake_view(base, shape, strides, offset)


@dataclass(frozen=True, slots=True)
class _Results:
    """All results of a call: a tensor (`is_single`), or several, some of which may be None."""

    is_single: bool
    results: tuple[_Result | None, ...]

    def like(self, tensors: Sequence[Tensor], mode: Any) -> Any:
        found = tuple(result and result.like(tensors, mode) for result in self.results)
        return found[0] if self.is_single else found


def _noted(made: Any, tensors: Sequence[Tensor]) -> _Results | None:
    """How results are laid out; None where they may be different another time, or it can't be told what they share."""
    leaves = (made,) if isinstance(made, Tensor) else made
    keys = [compat.storage_key(tensor) for tensor in tensors]
    if not isinstance(leaves, (tuple, list)) or len(set(keys)) < len(keys):
        return None
    results = [None if leaf is None else _result(leaf, tensors, keys) for leaf in leaves]
    pairs = list(zip(leaves, results, strict=True))
    new = [compat.storage_key(leaf) for leaf, result in pairs if result is not None and result.of is None]
    if any(leaf is not None and result is None for leaf, result in pairs) or len(set(new)) < len(new):
        return None
    return _Results(isinstance(made, Tensor), tuple(results))


def _result(made: Any, tensors: Sequence[Tensor], keys: Sequence[int]) -> _Result | None:
    look = _look(made) if isinstance(made, Tensor) else None
    if look is None:
        return None
    key = compat.storage_key(made)
    if key in keys:
        of = keys.index(key)
        return _Result(look, of, int(made.storage_offset() - tensors[of].storage_offset()), made is tensors[of])
    is_whole = made.storage_offset() == 0 and compat.storage_nbytes(made) == _extent(look) * made.element_size()
    return _Result(look) if is_whole else None


def _extent(look: _Look) -> int:
    """Elements that a tensor reaches over, made by itself."""
    shape, strides, *_ = look
    return 0 if 0 in shape else 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _look(tensor: Tensor) -> _Look | None:
    """All of a tensor that ops on fake tensors see, but where it lies; None for what isn't plain."""
    if type(tensor) is not compat.FakeTensor or tensor.layout is not torch.strided:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    shape, strides = tuple(tensor.shape), tensor.stride()
    is_known = all(type(n) is int for n in (*shape, *strides, tensor.storage_offset()))
    return (shape, strides, tensor.dtype, tensor.device) if is_known else None


def _values(node: fx.Node) -> Any:
    return fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])


def _slice(base: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Tensor | None:
    """A slice within the borders of `base`; None for another one."""
    is_plain = all(type(n) is int for n in (start, end)) and step == 1 and 0 <= start <= end <= base.shape[dim]
    if not is_plain:
        return None
    shape, strides = list(base.shape), base.stride()
    shape[dim] = end - start
    return compat.fake_view(base, shape, strides, int(base.storage_offset()) + start * strides[dim])


def _as_strided(base: Tensor, shape: Sequence[int], strides: Sequence[int], offset: Any = None) -> Tensor | None:
    return None if type(offset) is not int else compat.fake_view(base, shape, strides, offset)


_VIEWS: dict[Any, Callable[..., Tensor | None]] = {
    aten.slice.Tensor: _slice,
    aten.as_strided.default: _as_strided,
}
"""Views that differ from part to part: laid out at once."""
