"""What is captured of a model for one microbatch: a call that takes tensors only and whose state is all in buffers."""

from __future__ import annotations

import contextlib
import copy
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from fxmem.capture.loss import with_loss
from fxmem.passes.stage_assign import CutError
from fxmem.runtime.pipeline.batch import Microbatch


class Autocast(NamedTuple):
    """What `torch.autocast` does to the ops of a device now."""

    device: str
    is_on: bool
    dtype: torch.dtype | None

    @staticmethod
    def of(device: torch.device) -> Autocast:
        is_on = torch.is_autocast_enabled(device.type)
        return Autocast(device.type, is_on, torch.get_autocast_dtype(device.type) if is_on else None)

    def set(self) -> torch.autocast:
        """A context in which it is so."""
        return torch.autocast(self.device, self.dtype, enabled=self.is_on)

    def __str__(self) -> str:
        return f"autocast to {self.dtype}" if self.is_on else "no autocast"


class Traced(nn.Module):
    """`loss_fn(model(*args[:-1], **kwargs), args[-1])`, or the model's own result, of the tensors in `part`, in order.

    Other arguments are constants of the graph. A buffer that forward replaces by another tensor is overwritten instead,
    and regions of reentrant checkpointing are run once: the plan decides what is recomputed.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None, part: Microbatch) -> None:
        super().__init__()
        self.model, self._loss_fn, self._part = model, loss_fn, part

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = self._part.with_tensors(tensors)
        with _updated_buffers(self.model), _plain_checkpoints():
            return with_loss(self.model, self._loss_fn)(*args, **kwargs)


@contextlib.contextmanager
def _updated_buffers(model: nn.Module) -> Iterator[None]:
    """Buffers that are other tensors at the end than at the start: the old ones get the new ones' values.

    Raises CutError where they differ in shape or dtype.
    """
    before = [(m, name, t) for m in model.modules() for name, t in m._buffers.items() if t is not None]
    yield
    changed = [(m, name, old, m._buffers.get(name)) for m, name, old in before if m._buffers.get(name) is not old]
    with torch.no_grad():
        olds = {id(old) for *_, old, _ in changed}
        # two buffers may change places
        values = [new.clone() if new is not None and id(new) in olds else new for *_, new in changed]
        for (module, name, old, _), value in zip(changed, values, strict=True):
            if value is None or (value.shape, value.dtype) != (old.shape, old.dtype):
                kind = type(module).__name__
                raise CutError(f"forward replaces buffer {name!r} of a {kind} by one of another shape or dtype")
            old.copy_(value)
            module._buffers[name] = old


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Reentrant checkpointing runs its function as it is: its own backward can't be traced."""

    def run(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        tracked = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        with torch.set_grad_enabled(tracked and torch.is_grad_enabled()):  # its rule: no gradient in, none out
            return function(*args)

    with unittest.mock.patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", run):
        yield


class Attributes:
    """What the modules of a model hold beside tensors, as it was: forward may change it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._values = {name: dict(module.__dict__) for name, module in self._modules.items()}
        self._plain = self._seen()

    def _seen(self) -> dict[tuple[str, str], Any]:
        tables = ((path, name, value) for path, m in self._modules.items() for name, value in m.__dict__.items())
        return {(p, name): copy.deepcopy(v) for p, name, v in tables if name not in _TORCHS_OWN and _is_plain(v)}

    def changed(self) -> list[str]:
        """Names of the numbers, strings and flags (also in lists and dictionaries) that are others now."""
        seen = self._seen()
        return [".".join(filter(None, key)) for key, old in self._plain.items() if seen.get(key, _GONE) != old]

    def restore(self, *, keep_plain: bool = False) -> None:
        """Put back what was there; with `keep_plain` numbers, strings and flags stay as they are now."""
        plain = copy.deepcopy(self._plain) | (self._seen() if keep_plain else {})
        for path, module in self._modules.items():
            module.__dict__.clear()
            module.__dict__.update(self._values[path])
        for (path, name), value in plain.items():
            self._modules[path].__dict__[name] = value


_GONE = object()
_TORCHS_OWN = frozenset(nn.Module().__dict__)


def _is_plain(value: Any) -> bool:
    """Is it a number, a string, None, or a collection of nothing else?"""
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float, complex, str))
