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
from fxmem.capture.errors import as_capture_error, graph_break
from fxmem.capture.fakes import Fakes
from fxmem.capture.joint import JointGraph
from fxmem.capture.traced import Traced
from fxmem.errors import CaptureError

Frontend = Literal["dynamo", "trace", "aot"]


class _Captured(BaseException):
    """Leaves Dynamo with the graph before anything runs; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint


class _GraphBreak(Exception):
    """Dynamo can't make one graph of the callable, for this `reason`."""

    def __init__(self, reason: CaptureError) -> None:
        self.reason = reason


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

    `frontend="trace"`: the graph of `fxmem.compile(..., capture="trace")`.
    `frontend="aot"` leaves Dynamo out (see `fxmem.capture.direct`): faster on deep models, another graph.

    A model that breaks into several graphs is run on fake tensors from one to the next, which fails where the code
    between them needs a value. Raises CaptureError with the model's line.
    """
    fakes = Fakes(function, (args, dict(kwargs or {})), device)
    with _without_effects(train, dynamic), fakes.installed() as (fake_args, fake_kwargs):
        if frontend != "dynamo" and dynamic:
            raise CaptureError('symbolic sizes need frontend="dynamo"')
        if frontend == "trace":
            return [_traced(function, fake_args, fake_kwargs)]
        if frontend == "aot":
            return [trace(function, tuple(fake_args), fake_kwargs, fakes.mode)]
        try:
            return [_only_graph(function, fake_args, fake_kwargs, dynamic)]
        except _GraphBreak as broken:
            return _all_graphs(function, fake_args, fake_kwargs, dynamic, fakes.mode, broken.reason)


def first_break(
    function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> CaptureError | None:
    """Where and why torch breaks the graph of a call first, and what helps; None if it is one graph. Nothing is run."""
    fakes = Fakes(function, (args, dict(kwargs or {})), None)
    with _without_effects(train=True, dynamic=False), fakes.installed() as (fake_args, fake_kwargs):
        try:
            _only_graph(function, fake_args, fake_kwargs, dynamic=False)
        except _GraphBreak as broken:
            return broken.reason
        except CaptureError as error:
            return error
    return None


@contextlib.contextmanager
def _without_effects(train: bool, dynamic: bool) -> Iterator[None]:
    """Dynamo and autograd inside as asked for, everything afterwards as before."""
    with (
        warnings.catch_warnings(action="ignore"),  # Dynamo's own: as errors they would stop it
        compat.no_modes(),
        _kept_random_state(),
        compat.quiet_dynamo(dynamic),
        torch.set_grad_enabled(train),
    ):
        yield


def _traced(function: Callable[..., Any], args: Any, kwargs: Any) -> JointGraph:
    try:
        Traced(function, make_backend(_stop, inference=_stop))(*args, **kwargs)
    except _Captured as captured:
        return captured.joint
    raise CaptureError(_NOTHING, _where(function))


def _stop(joint: JointGraph) -> NoReturn:
    raise _Captured(joint)


def _only_graph(function: Callable[..., Any], args: Any, kwargs: Any, dynamic: bool) -> JointGraph:
    """The graph of `function`. Raises _GraphBreak if Dynamo would make several."""
    compiled = compat.isolated_compile(function, make_backend(_stop, inference=_stop), dynamic=dynamic)
    try:
        with compat.error_on_graph_break(True):
            compiled(*args, **kwargs)
    except _Captured as captured:
        return captured.joint
    except CaptureError:
        raise
    except Exception as error:
        raise _GraphBreak(graph_break(error)) from error
    raise CaptureError(_NOTHING, _where(function))


def _all_graphs(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    dynamic: bool,
    mode: compat.FakeTensorMode,
    reason: CaptureError,
) -> list[JointGraph]:
    """Every graph of a callable that Dynamo breaks for `reason`, run on fake tensors in between."""
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
    except compat.exceptions_allowed_to_be_fallback as error:  # what lies between the graphs needs a value
        raise graph_break(error) from error
    except Exception as error:
        raise as_capture_error(error) from error
    if not found:
        raise reason
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
