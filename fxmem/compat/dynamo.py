"""Dynamo and torch.compile: compilations kept apart, their settings, who calls a backend, errors, Dynamo's graphs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import convert_frame, eval_frame, trace_rules
from torch._dynamo import exc as dynamo_exc
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.nn.modules import container

CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters
"""Whether torch.compile itself can keep one call's compiled entries apart from others'."""


def isolated_compile(function: Callable[..., Any], backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` with its own set of compiled entries, and of settings: see `_settings_for_one_graph`.

    Otherwise several compilations of one model (a sweep over budgets), in torch 2.11 even of different models,
    share one recompile limit, after which Dynamo falls back to eager: that is, runs over the budget without a word.
    """
    _revert()
    if CAN_ISOLATE:
        options["isolate_recompiles"] = True
    else:
        function = _with_own_code(function)
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, **options)
    change = dynamo_config._make_closure_patcher(**_settings_for_one_graph())  # `patch` takes 20 us a call, this 3

    def run(*args: Any, **kwargs: Any) -> Any:
        revert = change()
        try:
            return compiled(*args, **kwargs)
        finally:
            revert()

    return run


def compile_torch_modules_in_place(backend: str) -> None:
    """From now on ``module.compile(backend=backend)`` compiles modules of torch's own classes, too.

    Dynamo leaves torch's own frames as they are. `torch.compile` puts a frame around a module of such a class (an
    nn.Sequential, say), but ``Module.compile`` doesn't: it would run without a plan, and without a word. Called while
    the backend is loaded, that is, within the first such call, which only a setting of Dynamo's can still reach.
    """
    original = nn.Module.compile
    if _is_running(original.__code__):
        _to_revert.append(dynamo_config._make_closure_patcher(wrap_top_frame=True)())

    @functools.wraps(original)
    def compile_module(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        _revert()
        if kwargs.get("backend") == backend and trace_rules.check(self.forward):
            self._compiled_call_impl = torch.compile(_with_own_code(self._call_impl), *args, **kwargs)
        else:
            original(self, *args, **kwargs)

    nn.Module.compile = compile_module  # type: ignore[method-assign]


_to_revert: list[Callable[[], None]] = []


def _revert() -> None:
    """The setting that the first call needed: nobody else's call of torch.compile runs under it."""
    while _to_revert:
        _to_revert.pop()()


def _is_running(code: types.CodeType) -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


RECOMPILE_LIMIT = 32
"""Versions of one frame that may be compiled before it is an error."""

_CAN_TRACE_GRADIENTS = hasattr(dynamo_exc, "AutogradGradRestartAnalysis")

_LOG_METHODS = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor")


def _settings_for_one_graph() -> dict[str, Any]:
    """Dynamo's settings under which RNN layers don't break the graph, nor calls of loggers and warnings (left out),
    nor gradients that forward itself asks for, if this torch can break there after all."""
    name = "ignore_logging_functions" if hasattr(dynamo_config, "ignore_logging_functions") else "ignore_logger_methods"
    gradients = {"trace_autograd_ops": True} if _CAN_TRACE_GRADIENTS else {}
    return {"allow_rnn": True, name: getattr(dynamo_config, name) | _logging_functions()} | gradients | {
        "allow_unspec_int_on_nn_module": True,  # a counter that a model keeps is no reason to compile again
        "fail_on_recompile_limit_hit": True,  # otherwise the frame runs without a plan from then on
        "recompile_limit": max(dynamo_config.recompile_limit, RECOMPILE_LIMIT),
        "accumulated_recompile_limit": max(dynamo_config.accumulated_recompile_limit, 8 * RECOMPILE_LIMIT),
    }


def _logging_functions() -> set[Callable[..., Any]]:
    """What writes log records or warnings; also what libraries have added to `logging.Logger` (``warning_once``)."""
    spaces = [logging, *_with_subclasses(logging.Logger), *_with_subclasses(logging.LoggerAdapter)]
    found = {value for space in spaces for name, value in vars(space).items() if name.startswith(_LOG_METHODS)}
    return {f for f in found if callable(f) and not isinstance(f, type)} | {
        warnings.warn,
        warnings.warn_explicit,
        torch._logging._internal.warning_once,
    }


def _with_subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = kind.__subclasses__()
    yield kind
    for subclass in subclasses:
        yield from _with_subclasses(subclass)


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `function`, with a code object of its own: Dynamo keeps compiled entries by code object."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    step.__code__ = step.__code__.replace()
    return step


@contextlib.contextmanager
def quiet_dynamo(dynamic: bool) -> Iterator[None]:
    """Dynamo without memory: sizes seen here don't make a later compilation dynamic, errors are not swallowed."""
    changes: dict[str, Any] = {
        "automatic_dynamic_shapes": False,
        "assume_static_by_default": not dynamic,
        "suppress_errors": False,
        "fail_on_recompile_limit_hit": False,
    }
    with dynamo_config.patch(**changes):
        yield


@contextlib.contextmanager
def seen_as_compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true: models then leave out checks that need values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def with_symbolic_batch(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, marked so that Dynamo takes its first dimension as a symbol (an error if the model fixes it)."""
    if tensor.ndim:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


def torch_compile_call() -> tuple[Any, Callable[..., Any] | None]:
    """Within a backend: the object that stands for the call of torch.compile, and what that compiles.

    (None, None) if another caller than torch.compile calls the backend.
    """
    call, running = _running_call()
    return call, running.get("fn")


def hold_settings() -> None:
    """Within a backend: from its next call on, what torch.compile returned runs under `isolated_compile`'s settings.

    Under Dynamo's own a frame runs without a plan, and without a word, after eight versions of it.
    """
    _revert()
    context = _running_call()[1].get("self")
    if isinstance(context, eval_frame.OptimizeContext):
        context.enter_exit_hooks.append(dynamo_config._make_closure_patcher(**_settings_for_one_graph()))


def _running_call() -> tuple[Any, Mapping[str, Any]]:
    """The object that stands for the call of torch.compile, and the variables of the frame that runs its result."""
    frame, call = inspect.currentframe(), None
    while frame is not None:
        values = frame.f_locals
        if isinstance(values.get("self"), torch._TorchCompileWrapper):
            call = values["self"]
        if call is not None and frame.f_code.co_filename == eval_frame.__file__ and callable(values.get("fn")):
            return call, values
        frame = frame.f_back
    return call, {}


def is_inner_frame() -> bool:
    """Within a backend: was the function whose graph it is called by a model's code that Dynamo left as it is?"""
    frame = inspect.currentframe()
    callers: list[str] | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file == convert_frame.__file__:
            callers = []
        elif callers is not None and file == eval_frame.__file__ and callable(frame.f_locals.get("fn")):
            return any(not caller.startswith(_TORCH) or caller == container.__file__ for caller in callers)
        elif callers is not None:
            callers.append(file)
        frame = frame.f_back
    return False


_TORCH = os.path.join(os.path.dirname(torch.__file__), "")


def torch_compile_call_of(compiled: Any) -> Any:
    """That object, from what torch.compile returned or a module compiled in place; None for anything else."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    contexts = [x for x in (getattr(compiled, "dynamo_ctx", None), *cells) if isinstance(x, eval_frame.OptimizeContext)]
    callbacks = [context.callback for context in contexts]
    backends = [eval_frame.innermost_backend(callback) for callback in callbacks if callable(callback)]
    return next((b for b in backends if isinstance(b, torch._TorchCompileWrapper)), None)


def past_dynamo(error: Exception) -> Exception:
    """`error` to be raised in a backend: of its own class still, but Dynamo hands it on instead of wrapping it."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "first_useful_frame": None}
    made = type(kind.__name__, (kind, ShortenTraceback), names)
    same: Exception = made.__new__(made, *error.args)
    same.__dict__.update(error.__dict__)
    return same.with_traceback(error.__traceback__)


def break_at_gradients(module: fx.GraphModule) -> None:
    """Within a backend: have Dynamo start over and break where `module` asks for gradients, if it does."""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    if not any(graph.find_nodes(op="call_function", target=torch.autograd.grad) for graph in graphs):
        return
    InstructionTranslator.current_tx().speculation_log.graph_break_on_autograd_grad = True
    restart = dynamo_exc.AutogradGradRestartAnalysis(restart_reason="a backward in the graph, and none behind it")
    raise past_dynamo(restart)


def innermost_user_frame(error: BaseException) -> str | None:
    """'file:line: code' of the user's line that Dynamo was tracing when it failed, if it knows."""
    stack: Sequence[Any] = getattr(error, "real_stack", None) or ()
    if not stack:
        return None
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def graph_break(module: fx.GraphModule) -> str | None:
    """Why and where Dynamo ended this graph, if it was not the end of the call."""
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    stack = reason.user_stack
    where = f" at {stack[-1].filename}:{stack[-1].lineno}: {stack[-1].line}" if stack else ""
    return f"{str(reason.reason).splitlines()[0]}{where}"


def resumed_at(module: fx.GraphModule) -> str | None:
    """The line at which Dynamo went on after a break, of a graph that is not the first of its function."""
    reason = getattr(module, "compile_subgraph_reason", None)
    frames = [(_RESUMED.fullmatch(frame.name), frame) for frame in (reason.user_stack if reason else ())]
    return next((f"{frame.filename}:{resumed['line']}" for resumed, frame in frames if resumed), None)


_RESUMED = re.compile(r"torch_dynamo_resume_in_.*_at_(?P<line>\d+)")


def placeholder_source(node: fx.Node) -> str:
    """Where Dynamo found the value of a graph input, as an expression: ``L['self']._modules['a']._parameters['w']``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


def fake_inputs(module: fx.GraphModule) -> list[Any]:
    """The fake tensors and sizes that stand for the inputs of a graph that Dynamo captured."""
    return [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]


def as_dynamo_gives(
    body: torch.nn.Module, fakes: Sequence[torch.Tensor], sources: Sequence[str], num_static: int
) -> fx.GraphModule:
    """A graph that calls `body` on all inputs, annotated as Dynamo annotates its graphs.

    `sources`: where each input comes from, as Dynamo writes it. The first `num_static` are parameters and buffers.
    """
    graph = fx.Graph()
    inputs = []
    for i, (fake, source) in enumerate(zip(fakes, sources, strict=True)):
        node = graph.placeholder(f"input_{i}")
        node.meta["example_value"] = fake
        node.meta["grapharg"] = types.SimpleNamespace(source=types.SimpleNamespace(name=source))
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"} if i < num_static else {}
        node._dynamo_source = None
        inputs.append(node)
    graph.output(graph.call_module("body", tuple(inputs)))
    module = fx.GraphModule({"body": body}, graph)
    module.meta["dynamo_compile_id"] = None
    module.__dict__["_param_name_to_source"] = {}
    return module
