"""Run somebody's script until its first backward has ended, and say whose step that was.

For as long as the script runs, two names of torch's are replaced: `nn.Module.__call__`, to see which module was called
from outside of any other, and `torch.autograd.backward`, to see what a backward comes from and to stop after it.
"""

from __future__ import annotations

import contextlib
import gc
import runpy
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.errors import OptionError

_NUM_CALLS = 64


@dataclass
class Call:
    """A call of a module from outside of any other. `place`: where the script (or what it calls) made it."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    place: Place
    roots: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Place:
    """A line of the script, the function that it is in ("" for none), and what the module is called there."""

    line: int
    function: str
    name: str


@dataclass(frozen=True)
class Found:
    """The step of a script. `failure`: what ended it before a backward did, such as the memory that it lacked."""

    call: Call
    optimizer: torch.optim.Optimizer | None
    failure: BaseException | None = None


class _Ended(BaseException):
    """The first backward has ended. No Exception, so that the script does not handle it."""


def first_step(script: Path, arguments: Sequence[str] = ()) -> Found:
    """Run `script` as the main program with `arguments`. Raises OptionError if no module was ever trained."""
    watch = _Watch(str(script.resolve()))
    failure: BaseException | None = None
    with watch.patched(), _as_main(script, arguments):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Ended:
            pass
        except BaseException as error:  # the script's own: it tells how far it came
            failure = error
            watch.optimizer = _optimizer_of(watch.calls[-1].module) if watch.calls else None
    call = watch.found or (watch.calls[-1] if watch.calls and failure is not None else None)
    if call is None:
        why = f": it ended with {type(failure).__name__}: {failure}" if failure is not None else ""
        raise OptionError(f"{script} runs no backward through a module{why}") from failure
    for parameter in call.module.parameters():
        parameter.grad = None
    return Found(call, watch.optimizer, None if watch.found else failure)


class _Watch:
    def __init__(self, script: str) -> None:
        self.script = script
        self.calls: deque[Call] = deque(maxlen=_NUM_CALLS)
        self.found: Call | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self._depth = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        call, backward = nn.Module.__call__, torch.autograd.backward
        watch = self

        def seen_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return watch.run(call, self, args, kwargs)

        def seen_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            found = watch.origin(roots)
            backward(tensors, *args, **kwargs)
            if found is not None:
                watch.found, watch.optimizer = found, _optimizer_of(found.module)
                raise _Ended

        nn.Module.__call__ = seen_call  # type: ignore[method-assign]
        torch.autograd.backward = seen_backward
        try:
            yield
        finally:
            nn.Module.__call__ = call  # type: ignore[method-assign]
            torch.autograd.backward = backward

    def run(self, call: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*args, **kwargs)`, noted if it is called from outside of any other and trains."""
        if self._depth or not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return call(module, *args, **kwargs)
        noted = Call(module, args, kwargs, _place(self.script, sys._getframe(2), module))
        self.calls.append(noted)
        self._depth += 1
        try:
            result = call(module, *args, **kwargs)
        finally:
            self._depth -= 1
        tensors = [leaf for leaf in compat.tree_leaves(result) if isinstance(leaf, Tensor)]
        noted.roots = tuple(t.grad_fn for t in tensors if t.grad_fn is not None)
        return result

    def origin(self, roots: Sequence[Tensor]) -> Call | None:
        """Of the calls whose outputs `roots` were made of, that of the module with most parameters."""
        reached = _reached([t.grad_fn for t in roots if t.grad_fn is not None])
        made = [call for call in self.calls if not reached.isdisjoint(call.roots)]
        return max(made, key=lambda call: sum(p.numel() for p in call.module.parameters()), default=None)


def _reached(starts: Sequence[Any]) -> set[Any]:
    """All nodes of autograd's graph behind `starts`."""
    found, left = set(starts), list(starts)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                left.append(node)
    return found


def _place(script: str, frame: FrameType | None, module: nn.Module) -> Place:
    """The innermost frame of the script's own in which the module has a name."""
    line, function = 0, ""
    while frame is not None:
        if str(Path(frame.f_code.co_filename).resolve()) == script:
            line, function = line or frame.f_lineno, function or _function(frame)
            name = _name_in(frame.f_locals, module)
            if name:
                return Place(frame.f_lineno, _function(frame), name)
            name = _name_in(frame.f_globals, module)
            if name:
                return Place(frame.f_lineno, "", name)
        frame = frame.f_back
    return Place(line, function, "")


def _function(frame: FrameType) -> str:
    return "" if frame.f_code.co_name == "<module>" else frame.f_code.co_name


def _name_in(names: Mapping[str, Any], module: nn.Module) -> str:
    return next((name for name, value in names.items() if value is module and name != "self"), "")


def _optimizer_of(module: nn.Module) -> torch.optim.Optimizer | None:
    """The optimizer, of those alive, that holds the module's parameters."""
    mine = {id(p) for p in module.parameters()}
    found: list[torch.optim.Optimizer] = [
        value
        for value in gc.get_objects()
        if issubclass(type(value), torch.optim.Optimizer)  # isinstance would ask lazy objects for their class
        and any(id(p) in mine for group in value.param_groups for p in group["params"])
    ]
    return found[0] if found else None


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """`sys` as a main program finds it; what the script prints goes to standard error."""
    argv, path, stdout = sys.argv, list(sys.path), sys.stdout
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.resolve().parent)]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.argv, sys.path[:], sys.stdout = argv, path, stdout
