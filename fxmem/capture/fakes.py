"""Fake stand-ins for a model's tensors and arguments, on the device they are meant for."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxmem import compat


class Fakes:
    """Replaces tensors of `function` (if a module, or found in a closure) and of `arguments` by fake ones.

    Aliasing is kept: views of one storage become views of one fake storage, tied parameters stay tied.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any, device: torch.device | str | None) -> None:
        self.mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
        self._modules = list(modules_of(function))
        self._arguments = arguments
        self._device = torch.device(device) if device is not None else self._nominal_device()
        self._bases: dict[int, Tensor] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}

    @contextlib.contextmanager
    def installed(self) -> Iterator[Any]:
        """Put the stand-ins into the modules for the time of the block; yields the arguments with theirs."""
        undo: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            for module in self._modules:
                tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module.__dict__)
                for slots in tables:
                    for name, value in list(slots.items()):
                        if isinstance(value, Tensor):
                            undo.append((slots, name, value))
                            slots[name] = self._stand_in(value)
            yield compat.tree_map_only(Tensor, self._stand_in, self._arguments)
        finally:
            for slots, name, value in undo:
                slots[name] = value

    def _nominal_device(self) -> torch.device:
        tensors = [t for m in self._modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
        tensors += [t for t in compat.tree_leaves(self._arguments) if isinstance(t, Tensor)]
        return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._tensors:
            return self._tensors[id(tensor)][1]
        if compat.is_wrapper_subclass(tensor) or tensor.layout != torch.strided:
            return tensor
        with torch.no_grad(), self.mode:
            fake = self._alike(tensor, self._device if tensor.is_meta else tensor.device)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
        fake.__dict__.update(
            {k: v for k, v in tensor.__dict__.items() if k.startswith("_dynamo_")}
        )  # mark_dynamic etc.
        self._tensors[id(tensor)] = (tensor, fake)  # keeps `tensor`, so that its id stays its own
        return fake

    def _alike(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A view of the storage's stand-in; but no view if it is all of a storage seen for the first time.

        Dynamo gives a view's base sizes of its own, which would be one more size symbol.
        """
        key = compat.storage_key(tensor)
        size, stride = tensor.size(), tensor.stride()
        nbytes = int(compat.storage_nbytes(tensor))
        if key not in self._bases and nbytes == tensor.numel() * tensor.itemsize:
            self._bases[key] = torch.empty_strided(size, stride, dtype=tensor.dtype, device=device)
            return self._bases[key].detach()
        if key not in self._bases:
            self._bases[key] = torch.empty(nbytes // tensor.itemsize, dtype=tensor.dtype, device=device)
        base = self._bases[key]
        typed = base if base.dtype == tensor.dtype else base.flatten().view(tensor.dtype)
        return typed.as_strided(size, stride, tensor.storage_offset())


def modules_of(*functions: Callable[..., Any]) -> Iterator[nn.Module]:
    """Modules reachable from modules, bound methods, partials, or functions' closures, each once."""
    seen: set[int] = set()
    for _, root in itertools.chain.from_iterable(map(root_modules, functions)):
        for module in root.modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield module


def root_modules(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that a callable is, is bound to, wraps or closes over, with the name that its code has for each."""
    named = [
        ("self", function),
        ("self", getattr(function, "__self__", None)),
        ("func", getattr(function, "func", None)),
    ]
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    held = zip(code.co_freevars if code else (), (cell.cell_contents for cell in cells), strict=False)
    named += [(name, getattr(value, "__self__", value)) for name, value in held]
    yield from ((name, module) for name, module in named if isinstance(module, nn.Module))
