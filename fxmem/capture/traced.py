"""Capture of a whole call without Dynamo (`capture="trace"`): AOTAutograd runs the model's own Python on fake tensors.

One graph, whatever would break Dynamo's. Python is followed blindly, so a capture stands for all calls with the same
shapes, strides, dtypes, devices and `requires_grad` of all tensors (arguments, parameters, buffers, tensors that
modules hold), the same train and eval flags, the same other arguments and the same autocast; another call is captured
anew. What else the code depends on (globals, attributes that are no tensors) is taken to stay as it is. Branches on
values of tensors are errors; so are calls that change attributes of the model, since they run no Python later. Without
gradients the model runs as it is.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxmem import compat
from fxmem.capture.errors import capture_errors
from fxmem.capture.fakes import root_modules
from fxmem.errors import CaptureError

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_TABLES = ("_parameters", "_buffers", "__dict__")
_Rebuild = Callable[[Iterator[Any]], Any]
_DEEPEST = 4  # objects in attributes of objects
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


class Traced:
    """`function`, each kind of call captured once and handed to `backend`, which returns the code to run."""

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self.function, self.backend = function, backend
        self._captured: dict[Any, tuple[_Body, Callable[..., Any]]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises CaptureError, with the model's line."""
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        call = _Call.of(self.function, args, kwargs)
        found = self._captured.get(call.key)
        if found is None:
            found = self._captured[call.key] = self._capture(call)
        body, code = found
        return body.result(iter(code(*call.tensors)))

    def _capture(self, call: _Call) -> tuple[_Body, Callable[..., Any]]:
        if len(self._captured) == compat.RECOMPILE_LIMIT:
            raise CaptureError(
                f"the model was captured {len(self._captured)} times for other shapes, flags or arguments; give "
                'batches fewer shapes (by padding), or leave out capture="trace", with which sizes can\'t be symbols'
            )
        body = _Body(self.function, call)
        fakes = compat.fakes_of(call.tensors)
        module = compat.as_dynamo_gives(body, fakes, [slot.source for slot in call.slots], call.num_held)
        with capture_errors(), compat.retracing(fakes), compat.seen_as_compiling():
            return body, self.backend(module, call.tensors)


@dataclass(frozen=True)
class _Slot:
    """Where a tensor is found: in a module's table by name, or (`table` None) among the leaves of the arguments."""

    table: dict[str, Any] | None
    name: Any
    source: str


@dataclass
class _Call:
    """One call, flattened: `tensors`, each once, and for every slot which of them it is.

    The first `num_held` tensors are the model's; the others come only as arguments. `slots`: the first of each tensor.
    """

    tensors: list[Tensor]
    slots: list[_Slot]
    num_held: int
    places: list[tuple[_Slot, int]]
    leaves: list[Any]
    build: Callable[[list[Any]], Any]
    key: Any
    modules: list[nn.Module] = field(default_factory=list)

    @classmethod
    def of(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        modules = [(root, path, m) for root, top in root_modules(function) for path, m in top.named_modules()]
        leaves, build, spec = compat.flatten_with_spec((tuple(args), dict(kwargs)))
        found = cls([], [], 0, [], leaves, build, None, [m for _, _, m in modules])
        index: dict[int, int] = {}
        for root, path, module in modules:
            for slot, value in _held(root, path, module):
                found._place(slot, value, index)
        found.num_held = len(found.tensors)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                found._place(_Slot(None, i, f"L['arguments'][{i}]"), leaf, index)
        others = tuple((type(x), _plain(x)) for x in leaves if not isinstance(x, Tensor))
        flags = tuple(module.training for module in found.modules)
        tensors = tuple(map(_look, found.tensors))
        names = tuple((slot.source, i) for slot, i in found.places)
        found.key = (tensors, names, others, spec, flags, compat.autocast_state())
        return found

    def _place(self, slot: _Slot, value: Tensor, index: dict[int, int]) -> None:
        number = index.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self.slots.append(slot)
        self.places.append((slot, number))


def _held(root: str, path: str, module: nn.Module) -> Iterator[tuple[_Slot, Tensor]]:
    where = "".join(f"._modules['{step}']" for step in path.split(".") if step)
    for table in _TABLES:
        values = module.__dict__ if table == "__dict__" else module.__dict__[table]
        for name, value in values.items():
            if isinstance(value, Tensor):
                step = f".{name}" if table == "__dict__" else f".{table}['{name}']"
                yield _Slot(values, name, f"L['{root}']{where}{step}"), value


def _look(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else tensor.layout
    return tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.requires_grad, type(tensor)


def _plain(value: Any) -> Any:
    if isinstance(value, _PLAIN) or callable(value):
        return value
    raise CaptureError(
        f'capture="trace" takes tensors, numbers, strings and None as arguments (in lists, tuples, dicts), not '
        f"{type(value).__name__}: a change in it could not be seen"
    )


class _Body(nn.Module):
    """The model's call as a function of all its tensors, in the order of `call.tensors`; returns tensors only."""

    def __init__(self, function: Callable[..., Any], call: _Call) -> None:
        super().__init__()
        self._function = (function,)  # no child: its parameters come as arguments
        self._places, self._build = call.places, call.build
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        self._held = _Attributes(call.modules)
        self.result: _Rebuild = list

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._constants)
        with self._held.unchanged():
            for slot, number in self._places:
                (leaves if slot.table is None else slot.table)[slot.name] = tensors[number]
            self._held.placed()
            args, kwargs = self._build(leaves)
            result = self._function[0](*args, **kwargs)
        outputs, self.result = _taken_apart(result)
        return tuple(outputs)


def _taken_apart(result: Any, depth: int = 0) -> tuple[list[Tensor], _Rebuild]:
    """The tensors in `result`, also those in attributes of objects (caches of keys), and what builds it of others."""
    leaves, build = compat.flatten(result)
    apart = [_leaf(leaf, depth) for leaf in leaves]
    rebuilds = [rebuild for _, rebuild in apart]
    tensors = [t for found, _ in apart for t in found]
    return tensors, lambda values: build([rebuild(values) for rebuild in rebuilds])


def _leaf(leaf: Any, depth: int) -> tuple[list[Tensor], _Rebuild]:
    if isinstance(leaf, Tensor):
        return [leaf], next
    if isinstance(leaf, _PLAIN) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return [], lambda _: leaf
    if depth == _DEEPEST:
        raise CaptureError(f'capture="trace" can\'t return a {type(leaf).__name__}: return tensors in containers')
    tensors, attributes = _taken_apart(dict(vars(leaf)), depth + 1)
    if not tensors:
        return [], lambda _: leaf
    bare = copy.copy(leaf)
    vars(bare).clear()

    def rebuilt(values: Iterator[Any]) -> Any:
        made = copy.copy(bare)
        vars(made).update(attributes(values))
        return made

    return tensors, rebuilt


class _Attributes:
    """The tables of modules, for the time of a traced call."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables = [
            (module, table, module.__dict__ if table == "__dict__" else module.__dict__[table])
            for module in modules
            for table in _TABLES
        ]
        self._placed: list[dict[str, Any]] = []

    def placed(self) -> None:
        """The stand-ins are in place: what differs from now on was changed by the call."""
        self._placed = [dict(values) for _, _, values in self._tables]

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put everything back. Raises CaptureError if the call changed an attribute that a later call would read.

        What is noted for the first time and is no tensor (a kind of problem, a device) stays.
        """
        before = [dict(values) for _, _, values in self._tables]
        try:
            yield
            changed = next(self._changes(), None)
        finally:
            for (_, _, values), old, placed in zip(self._tables, before, self._placed, strict=True):
                noted = {n: v for n, v in values.items() if placed.get(n) is None and isinstance(v, _PLAIN)}
                for name in values.keys() - old.keys() - noted.keys():
                    del values[name]
                values.update({**old, **noted})
            self._placed = []
        if changed is not None:
            raise CaptureError(
                f"forward changes the attribute {changed}, and what is captured runs no Python: hold it in a buffer "
                'that is written to in place, or leave out capture="trace"'
            )

    def _changes(self) -> Iterator[str]:
        for (module, _, values), placed in zip(self._tables, self._placed, strict=True):
            for name in values.keys() | placed.keys():
                old, new = placed.get(name), values.get(name)
                is_noted = old is None and isinstance(new, _PLAIN)
                if old is not new and not is_noted and not (isinstance(old, _PLAIN) and old == new):
                    yield f"{name!r} of {type(module).__name__}"
