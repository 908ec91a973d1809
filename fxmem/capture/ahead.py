"""Capture ahead of time: the joint graphs of a model without running it."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import fx, nn

from fxmem import compat
from fxmem.capture.backend import make_backend
from fxmem.capture.direct import trace
from fxmem.capture.errors import as_capture_error
from fxmem.capture.fakes import Fakes
from fxmem.capture.joint import JointGraph
from fxmem.errors import CaptureError

Frontend = Literal["dynamo", "aot"]


class _Captured(BaseException):
    """Leaves Dynamo with the graph before anything runs; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint


class _GraphBreak(Exception):
    """Dynamo can't make one graph of the callable."""


def capture(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    dynamic: bool = False,
    device: torch.device | str | None = None,
    frontend: Frontend = "dynamo",
) -> list[JointGraph]:
    """The graphs that `torch.compile` would make of one call, node for node, without running or allocating anything.

    `function`: a module or any callable; its parameters and `args` may be real, fake or meta tensors (meta ones are
    planned for `device`, default: that of the first tensor elsewhere, or the CPU). `train=False`: forward only, under
    `no_grad`. `dynamic`: sizes of inputs are symbols. Modules keep their state, mode and compiled code; random state
    and grad mode are kept.

    `frontend="aot"` leaves Dynamo out (see `fxmem.capture.direct`): faster on deep models, another graph.

    A model that breaks into several graphs is run on fake tensors from one to the next, which fails where the code
    between them needs a value. Raises CaptureError with the model's line.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings(action="ignore"))  # Dynamo's own: as errors they would stop it
        stack.enter_context(compat.no_modes())
        stack.enter_context(_kept_random_state())
        stack.enter_context(compat.quiet_dynamo(dynamic))
        stack.enter_context(torch.set_grad_enabled(train))
        fakes = Fakes(function, (args, dict(kwargs or {})), device)
        fake_args, fake_kwargs = stack.enter_context(fakes.installed())
        if frontend == "aot":
            if dynamic:
                raise CaptureError('symbolic sizes need frontend="dynamo"')
            return [trace(function, tuple(fake_args), fake_kwargs, fakes.mode)]
        try:
            return [_only_graph(function, fake_args, fake_kwargs, dynamic)]
        except _GraphBreak:
            return _all_graphs(function, fake_args, fake_kwargs, dynamic, fakes.mode)


def _only_graph(function: Callable[..., Any], args: Any, kwargs: Any, dynamic: bool) -> JointGraph:
    """The graph of `function`. Raises _GraphBreak if Dynamo would make several."""

    def stop(joint: JointGraph) -> NoReturn:
        raise _Captured(joint)

    compiled = compat.isolated_compile(function, make_backend(stop, inference=stop), dynamic=dynamic)
    try:
        with compat.error_on_graph_break(True):
            compiled(*args, **kwargs)
    except _Captured as captured:
        return captured.joint
    except CaptureError:
        raise
    except Exception as error:
        raise _GraphBreak from error
    raise CaptureError(_NOTHING, _where(function))


def _all_graphs(
    function: Callable[..., Any], args: Any, kwargs: Any, dynamic: bool, mode: compat.FakeTensorMode
) -> list[JointGraph]:
    """Every graph of a callable that Dynamo breaks, run on fake tensors in between."""
    found: list[JointGraph] = []

    def keep(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        found.append(joint)
        return compat.default_partition(joint.graph_module, joint.num_forward_outputs, joint.static_indices)

    def run_fake(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(args: list[Any]) -> Any:
            with mode:
                return fx.Interpreter(module).run(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    backend = make_backend(keep, compiler=run_fake, inference=found.append)
    compiled = compat.isolated_compile(function, backend, dynamic=dynamic)
    try:
        compiled(*args, **kwargs)
    except Exception as error:
        raise as_capture_error(error) from error
    if not found:
        raise CaptureError(_NOTHING, _where(function))
    return found


_NOTHING = "nothing to capture: the callable runs no tensor operation that Dynamo traces"


def _where(function: Callable[..., Any]) -> str | None:
    code = inspect.unwrap(function.forward if isinstance(function, nn.Module) else function)
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (TypeError, OSError):
        return None


@contextlib.contextmanager
def _kept_random_state() -> Iterator[None]:
    """Torch's random state after as before, without touching a device that was never used."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
