"""Capture ahead of time: the joint graphs of a model without running it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import fx, nn

from fxmem import compat
from fxmem.capture.backend import make_backend
from fxmem.capture.fakes import Fakes
from fxmem.capture.joint import JointGraph, user_frame
from fxmem.errors import CaptureError, FxmemError

Frontend = Literal["dynamo", "make_fx"]


class _Captured(BaseException):
    """Leaves Dynamo with the graph before anything runs; not an Exception, so that nothing on the way swallows it."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint = joint


def with_loss(function: Callable[..., Any], loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`loss_fn(function(*args, **kwargs))` as one callable."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return loss_fn(function(*args, **kwargs))

    return step


def capture(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    train: bool = True,
    dynamic: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    device: torch.device | str | None = None,
    frontend: Frontend = "dynamo",
) -> list[JointGraph]:
    """The graphs that `torch.compile` would make of one call, node for node, without running or allocating anything.

    `function`: a module or any callable; its parameters and `args` may be real, fake or meta tensors (meta ones are
    planned for `device`, default: that of the first tensor elsewhere, or the CPU). `train=False`: forward only, under
    `no_grad`. `dynamic`: sizes of inputs are symbols. Modules keep their state, mode and compiled code; random state
    and grad mode are kept.

    A model that breaks into several graphs is run on fake tensors from one to the next, which fails where the code
    between them needs a value. Raises CaptureError with the model's line.
    """
    if frontend == "make_fx":
        from fxmem.capture.functional import trace

        return [trace(function, args, kwargs or {}, train=train, dynamic=dynamic, loss_fn=loss_fn, device=device)]
    target = function if loss_fn is None else with_loss(function, loss_fn)
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.no_modes())
        stack.enter_context(_kept_random_state())
        stack.enter_context(compat.quiet_dynamo(dynamic))
        stack.enter_context(torch.set_grad_enabled(train))
        fakes = Fakes(function, (args, dict(kwargs or {})), device)
        try:
            with fakes.installed(all_tensors=False) as (fake_args, fake_kwargs):
                return [_first_graph(target, fake_args, fake_kwargs, dynamic)]
        except compat.Unsupported:
            with fakes.installed(all_tensors=True) as (fake_args, fake_kwargs):
                return _all_graphs(target, fake_args, fake_kwargs, dynamic, fakes.mode)


def _first_graph(function: Callable[..., Any], args: Any, kwargs: Any, dynamic: bool) -> JointGraph:
    """The only graph of `function`. Raises Unsupported if Dynamo would break it."""

    def stop(joint: JointGraph) -> NoReturn:
        raise _Captured(joint)

    compiled = compat.isolated_compile(function, make_backend(stop, inference=stop), fullgraph=True, dynamic=dynamic)
    try:
        compiled(*args, **kwargs)
    except _Captured as captured:
        return captured.joint
    except compat.Unsupported:
        raise
    except Exception as error:
        raise _capture_error(error) from error
    raise CaptureError("nothing to capture: the callable has no tensor operations", _where(function))


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
        raise _capture_error(error) from error
    if not found:
        raise CaptureError("nothing to capture: the callable has no tensor operations", _where(function))
    return found


def _capture_error(error: Exception) -> FxmemError:
    """The error as CaptureError with the model's line; fxmem's own errors pass through."""
    inner = error.inner_exception if isinstance(error, compat.BackendCompilerFailed) else error
    if isinstance(inner, FxmemError):
        return inner
    source = compat.innermost_user_frame(error) or user_frame(str(error)) or _traceback_frame(inner)
    first_line = next((line for line in str(inner).splitlines() if line.strip()), type(inner).__name__)
    return CaptureError(f"can't capture the model: {type(inner).__name__}: {first_line}", source)


def _traceback_frame(error: BaseException) -> str | None:
    import traceback

    return user_frame("".join(traceback.format_tb(error.__traceback__)))


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
