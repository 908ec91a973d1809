"""Which tensors a callable holds: what stands in memory before it runs."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxmem import compat

_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)


def reachable_tensors(root: Any) -> list[Tensor]:
    """Real tensors that `root` holds, each once.

    Followed: closure cells, defaults, and the globals that a function's code names; bound self; partials; containers;
    attributes of modules, optimizers and of objects of classes that are not torch's own; gradients. Not followed:
    classes, imported modules, weak references, autograd graphs, and whatever else lives in the process.
    """
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            stack.extend(_of_tensor(value, found))
        else:
            stack.extend(_inside(value))
    return list(found.values())


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, int]:
    """address -> bytes of the storages of `tensors` on `device`, each once."""
    parts = (part for t in tensors if t.device == device for part in compat.strided_parts(t))
    on_device = (part.untyped_storage() for part in parts if part.layout == torch.strided)
    return {s.data_ptr(): s.nbytes() for s in on_device if s.nbytes()}


def _of_tensor(tensor: Tensor, found: dict[int, Tensor]) -> Iterator[Any]:
    if isinstance(tensor, compat.FakeTensor) or tensor.device.type == "meta":
        return
    if compat.is_wrapper_subclass(tensor):
        yield from (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    else:
        found[id(tensor)] = tensor
    if tensor.is_leaf and tensor.grad is not None:
        yield tensor.grad


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from list(value.keys())
        yield from list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        yield from list(value)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, types.FunctionType):
        yield from _inside_function(value)
    elif _is_followed(value):
        yield from _attributes(value)


def _inside_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    if not _is_torch(function.__module__):
        yield from (
            function.__globals__[name] for name in _global_names(function.__code__) if name in function.__globals__
        )


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or a function defined in it, loads as globals."""
    loaded = (i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    inner = (name for c in code.co_consts if isinstance(c, types.CodeType) for name in _global_names(c))
    return tuple(dict.fromkeys((*loaded, *inner)))


def _attributes(value: Any) -> Iterator[Any]:
    yield getattr(value, "__dict__", None)
    for cls in type(value).__mro__:
        names = cls.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                yield getattr(value, name, None)


def _is_followed(value: Any) -> bool:
    if isinstance(value, (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)):
        return True
    return not _is_torch(type(value).__module__) and not isinstance(value, types.BuiltinFunctionType)


def _is_torch(module: str | None) -> bool:
    return (module or "").split(".")[0] in ("torch", "builtins", "logging", "weakref", "functorch", "sympy")
