"""Every private torch name that fxmem uses, in one place, so that a new torch release breaks one file."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import os
import re
import types
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._C._autograd import DeviceType
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo import error_on_graph_break, eval_frame
from torch._dynamo import exc as dynamo_exc
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    RestartAnalysis,
    ShortenTraceback,
    TorchDynamoException,
    exceptions_allowed_to_be_fallback,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._functorch import aot_autograd as aot
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_capture, graph_compile, runtime_wrappers
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SavedForBackwardsNoVcCheckAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition as _default_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "BackendCompilerFailed",
    "BoxedCodeGen",
    "BufferAOTInput",
    "FailOnRecompileLimitHit",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "HigherOrderOperator",
    "InputMutationAOTOutput",
    "OpOverload",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "RestartAnalysis",
    "TangentAOTInput",
    "TorchDynamoException",
    "aot_autograd",
    "aot_export_joint",
    "compile_with_inductor",
    "cpu_memory_deltas",
    "current_fake_mode",
    "default_partition",
    "default_store",
    "error_on_graph_break",
    "exceptions_allowed_to_be_fallback",
    "fake_in_current_mode",
    "fake_mode_of",
    "has_gradient_hooks",
    "hint",
    "innermost_user_frame",
    "is_fully_sharded",
    "is_wrapper_subclass",
    "isolated_compile",
    "no_aot_cache",
    "no_donated_buffers",
    "no_idle_checks",
    "no_modes",
    "past_dynamo",
    "placeholder_source",
    "profiler_is_active",
    "queue_after_backward",
    "quiet_dynamo",
    "recompiled",
    "saved_description",
    "seen_as_compiling",
    "shard_bytes",
    "start_memory_log",
    "stop_memory_log",
    "storage_key",
    "storage_nbytes",
    "strided_parts",
    "symbol_hints",
    "torch_compile_call",
    "torch_compile_call_of",
    "trainable_lstms",
    "tree_leaves",
    "tree_map_only",
]


def current_fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode of the compilation in progress, if any."""
    mode: FakeTensorMode | None = detect_fake_mode()
    return mode


def fake_mode_of(nodes: Iterable[fx.Node]) -> FakeTensorMode | None:
    """The mode in which a graph was traced: that of the first fake tensor among the values of `nodes`."""
    values = (node.meta.get("val") for node in nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def fake_in_current_mode(value: Any) -> Any:
    """`value`, or its copy in the compilation's FakeTensorMode if it is a FakeTensor of another one.

    Keeps the symbolic dimensions that Dynamo chose for it.
    """
    mode = current_fake_mode()
    if not isinstance(value, FakeTensor) or mode is None or value.fake_mode is mode:
        return value
    tracing = TracingContext.try_get()
    context = tracing.tensor_to_context.get(value) if tracing is not None else None
    source = context.tensor_source if context is not None and hasattr(context, "tensor_source") else None
    return mode.from_tensor(value, symbolic_context=context, source=source)


def default_partition(
    joint: fx.GraphModule, num_forward_outputs: int, static_indices: Sequence[int] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own split of a joint graph, which saves everything that backward reads: the step without a plan."""
    halves: tuple[fx.GraphModule, fx.GraphModule] = _default_partition(
        joint, None, num_fwd_outputs=num_forward_outputs, static_lifetime_input_indices=list(static_indices)
    )
    return halves


def aot_export_joint(
    stack: contextlib.ExitStack, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.GraphModule:
    """AOTAutograd's joint graph of a module, inputs and outputs described by ``meta["desc"]``; no decompositions."""
    with_sources = functools.partial(make_fx, record_stack_traces=True)  # AOTAutograd relies on Dynamo for these
    with unittest.mock.patch.object(graph_capture, "make_fx", with_sources):
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, keep_inference_input_mutations=True)
    return joint.graph_module


@contextlib.contextmanager
def seen_as_compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true: models then leave out checks that need values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def break_at_gradients(module: fx.GraphModule) -> None:
    """Within a backend: have Dynamo start over and break where `module` asks for gradients, if it does."""
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    if not any(graph.find_nodes(op="call_function", target=torch.autograd.grad) for graph in graphs):
        return
    InstructionTranslator.current_tx().speculation_log.graph_break_on_autograd_grad = True
    restart = dynamo_exc.AutogradGradRestartAnalysis(restart_reason="a backward in the graph, and none behind it")
    raise past_dynamo(restart)


def recompiled(module: fx.GraphModule) -> Callable[..., Any]:
    """The module's generated forward, now and not at its first call, which would keep the call's arguments alive."""
    module.recompile()
    if isinstance(module, _LazyGraphModule):
        _LazyGraphModule.force_recompile(module)
    return module.forward


def no_aot_cache() -> contextlib.AbstractContextManager[None]:
    """AOTAutograd's cache off: its key knows the graph but not the budget, so it would return another plan's code."""
    manager: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, force_autograd_cache=False
    )
    return manager


@contextlib.contextmanager
def trainable_lstms() -> Iterator[None]:
    """LSTMs on the CPU are traced as what can be trained.

    torch takes oneDNN's layer for inference if the layer's input needs no gradient, even if the weights do: what it
    saves for backward is None, which AOTAutograd refuses.
    """
    from torch._decomp import decompositions

    def select(input: Any, hx: Any, params: Any) -> Any:
        is_trained = torch.is_grad_enabled() and any(t.requires_grad for t in tree_leaves((input, hx, params)))
        return decompositions.one_layer_lstm if is_trained else torchs_own(input, hx, params)

    torchs_own: Any = decompositions.select_one_layer_lstm_function
    with unittest.mock.patch.object(decompositions, "select_one_layer_lstm_function", select):
        yield


@contextlib.contextmanager
def no_donated_buffers() -> Iterator[None]:
    """Saved tensors stay autograd's own: donated ones, which only inductor makes use of, forbid `retain_graph`.

    The setting of that name is read again when a backward runs, so it is of no use for one compilation.
    """
    if not hasattr(graph_compile, "collect_bw_donated_buffer_idxs"):
        yield
        return
    with unittest.mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[]):
        yield


@contextlib.contextmanager
def no_idle_checks(module: fx.GraphModule) -> Iterator[None]:
    """Compile `module` without AOTAutograd's check of custom ops where it calls none.

    The check is a dispatch mode around the first call, under which a number in an op takes 8 bytes more than ever
    after: the measurement of the first step would see them.
    """
    kind = getattr(runtime_wrappers, "_FirstInvocationContext", None)
    graphs = [m.graph for m in module.modules() if isinstance(m, fx.GraphModule)]
    if kind is None or any(_is_custom(node.target) for graph in graphs for node in graph.nodes):
        yield
        return
    with unittest.mock.patch.object(kind, "__init__", lambda self: setattr(self, "_is_first", False)):
        yield


def _is_custom(target: Any) -> bool:
    """Is it an op of someone's own library?"""
    name = target.name() if isinstance(target, OpOverload) else str(getattr(target, "_qualified_op_name", "aten::"))
    return name.split("::")[0] not in ("aten", "prim", "prims", "_c10d_functional", "c10d", "higher_order")


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Is it a subclass that holds other tensors (DTensor and the like)?"""
    return bool(is_traceable_wrapper_subclass(tensor))


def hint(size: int | torch.SymInt) -> int:
    """The value of a size seen at capture, without a guard on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


CAN_ISOLATE = "isolate_recompiles" in inspect.signature(torch.compile).parameters
"""Whether torch.compile itself can keep one call's compiled entries apart from others'."""


def isolated_compile(function: Callable[..., Any], backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` with its own set of compiled entries, and of settings: see `_settings_for_one_graph`.

    Otherwise several compilations of one model (a sweep over budgets), in torch 2.11 even of different models,
    share one recompile limit, after which Dynamo falls back to eager: that is, runs over the budget without a word.
    """
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


def past_dynamo(error: Exception) -> Exception:
    """`error` to be raised in a backend: of its own class still, but Dynamo hands it on instead of wrapping it."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "first_useful_frame": None}
    made = type(kind.__name__, (kind, ShortenTraceback), names)
    same: Exception = made.__new__(made, *error.args)
    same.__dict__.update(error.__dict__)
    return same.with_traceback(error.__traceback__)


def torch_compile_call() -> tuple[Any, Callable[..., Any] | None]:
    """Within a backend: the object that stands for the call of torch.compile, and what that compiles.

    (None, None) if another caller than torch.compile calls the backend.
    """
    frame, call = inspect.currentframe(), None
    while frame is not None:
        values = frame.f_locals
        if isinstance(values.get("self"), torch._TorchCompileWrapper):
            call = values["self"]
        if call is not None and frame.f_code.co_filename == eval_frame.__file__ and callable(values.get("fn")):
            return call, values["fn"]
        frame = frame.f_back
    return call, None


def torch_compile_call_of(compiled: Any) -> Any:
    """That object, from what torch.compile returned or a module compiled in place; None for anything else."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
    contexts = [x for x in (getattr(compiled, "dynamo_ctx", None), *cells) if isinstance(x, eval_frame.OptimizeContext)]
    callbacks = [context.callback for context in contexts]
    backends = [eval_frame.innermost_backend(callback) for callback in callbacks if callable(callback)]
    return next((b for b in backends if isinstance(b, torch._TorchCompileWrapper)), None)


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


def placeholder_source(node: fx.Node) -> str:
    """Where Dynamo found the value of a graph input, as an expression: ``L['self']._modules['a']._parameters['w']``."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage that `tensor` is a view of (if sparse: its values); valid while that storage lives."""
    return int(strided_parts(tensor)[-1].untyped_storage()._cdata)


def storage_nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the storage that `tensor` is a view of; all bytes of a sparse tensor."""
    nbytes: int | torch.SymInt = sum(part.untyped_storage().nbytes() for part in strided_parts(tensor))
    return nbytes


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the bytes of `tensor`: itself, or the indices and values of a sparse one (values last)."""
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def symbol_hints(tensor: torch.Tensor) -> dict[str, int]:
    """Value at capture of every size symbol that the shape environment of a FakeTensor has seen."""
    shape_env = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    attribute = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"  # before torch 2.12
    values = getattr(shape_env, attribute, {})
    return {str(symbol): int(value) for symbol, value in values.items()}


def innermost_user_frame(error: BaseException) -> str | None:
    """'file:line: code' of the user's line that Dynamo was tracing when it failed, if it knows."""
    stack: Sequence[Any] = getattr(error, "real_stack", None) or ()
    if not stack:
        return None
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"


def cpu_memory_deltas(function: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Run `function`: its result, and the bytes of each allocation (> 0) and release (< 0) on the CPU, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes two lines to stderr a session
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = function()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    on_cpu = [(e.start_ns(), e.nbytes()) for e in events if e.device_type() == DeviceType.CPU]
    return result, [nbytes for _, nbytes in sorted(on_cpu, key=lambda event: event[0])]


def saved_description(index: int, is_unchecked: bool) -> Any:
    """AOTAutograd's note on the `index`-th value that forward saves for backward."""
    return SavedForBackwardsNoVcCheckAOTOutput(index) if is_unchecked else SavedForBackwardsAOTOutput(index)


PartitionFn = Callable[[fx.GraphModule, Sequence[int], int], tuple[fx.GraphModule, fx.GraphModule]]
"""(joint graph, positions of parameters and buffers, number of forward outputs) -> (forward, backward)"""


class _InductorPartitioner(CustomPartitionerFn):
    """`partition` for inductor, which caches by `uuid()` and pickles the partitioner into its cache keys."""

    def __init__(self, partition: PartitionFn, key: str) -> None:
        self.partition, self.key = partition, key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Any:
        halves = self.partition(gm, options["static_lifetime_input_indices"] or (), options["num_fwd_outputs"])
        for moved in (node.args[0] for half in halves for node in half.graph.nodes if _is_transfer(node, "offload")):
            moved.meta["inductor_realize_to_strides"] = True
        return halves

    def uuid(self) -> str:
        return f"fxmem {self.key}"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.uuid(),)


_PLANNED_LAYOUTS: dict[str, Any] = {"layout_optimization": False, "comprehensive_padding": False}


def _is_transfer(node: fx.Node, name: str = "") -> bool:
    """Is it a call of the op `name` of fxmem's library, or of any?"""
    return isinstance(node.target, OpOverload) and node.target.name().startswith(f"fxmem::{name}")


def compile_with_inductor(
    module: fx.GraphModule, example_inputs: Sequence[Any], partition: PartitionFn, key: str
) -> Callable[..., Any]:
    """Inductor with `partition` in place of its own partitioner; `key` is part of the key of its caches."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def compile_half(half: fx.GraphModule, *args: Any, **options: Any) -> Any:
        """What moves has the strides that the plan saw: no channels-last convolutions, no padded rows beside it."""
        moves = any(_is_transfer(node) for node in half.graph.nodes)
        with config.patch(_PLANNED_LAYOUTS) if moves else contextlib.nullcontext():
            return compile_fx_inner(half, *args, **options)

    patches = {
        "custom_partitioner_fn": _InductorPartitioner(partition, key),
        "reorder_for_peak_memory": False,  # the plan's order is the order: transfers would be moved past each other
    }
    with no_aot_cache(), no_idle_checks(module), trainable_lstms():
        compiled: Any = compile_fx(module, list(example_inputs), compile_half, config_patches=patches)
    run: Callable[..., Any] = compiled
    return run


_profiler: Any = torch.autograd  # which re-exports the profiler's own calls, untyped


def profiler_is_active() -> bool:
    """Is a torch profiler running on this thread? There can be only one."""
    return bool(_profiler._profiler_enabled())


def start_memory_log() -> None:
    """Log this thread's allocations, and no ops: costs microseconds an allocation. Raises RuntimeError if profiled."""
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

    if profiler_is_active():
        raise RuntimeError("a profiler is active on this thread")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes two lines to stderr a session
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _profiler._prepare_profiler(config, {ProfilerActivity.CPU})
    _profiler._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})


def stop_memory_log() -> list[tuple[str, int, int]]:
    """End the log: (range name or "", address, bytes) in order; bytes > 0 allocated, < 0 released, 0 for a range."""
    from torch._C._profiler import _EventType

    def walk(events: Any) -> Iterator[Any]:
        for event in events:
            yield event
            yield from walk(event.children)

    events = sorted(walk(_profiler._disable_profiler().experimental_event_tree()), key=lambda e: e.start_time_ns)
    log: list[tuple[str, int, int]] = []
    for event in events:
        if event.tag != _EventType.Allocation:
            log.append((event.name, 0, 0))
        elif event.typed[1].device.type == "cpu":
            log.append(("", event.typed[1].ptr, event.typed[1].alloc_size))
    return log


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that is running on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def keeps_graph() -> bool:
    """Will the backward pass that is running on this thread leave saved tensors for another one?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


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


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Did anyone register hooks for the gradient of this leaf, to change it or to act when it has been added?"""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def symbol_name(value: Any) -> str | None:
    """Name of the size symbol that `value` is, if it is one."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        return str(value.node.expr)
    return None


def symbol_values(example_inputs: Sequence[Any], args: Sequence[Any]) -> dict[str, int]:
    """Values that a call's `args` give to the size symbols of the graph's `example_inputs`.

    Also to those that only the storage behind an input mentions (a slice's base has rows of its own).
    """
    values: dict[str, int] = {}
    for example, arg in zip(example_inputs, args, strict=True):
        pairs = zip(example.shape, arg.shape, strict=True) if isinstance(example, torch.Tensor) else [(example, arg)]
        for size, actual in pairs:
            name = symbol_name(size)
            if name is not None:
                values[name] = int(actual)
    for example, arg in zip(example_inputs, args, strict=True):
        if isinstance(example, torch.Tensor):
            values |= _symbol_of_storage(storage_nbytes(example), int(storage_nbytes(arg)), values)
    return values


def _symbol_of_storage(nbytes: int | torch.SymInt, actual: int, values: Mapping[str, int]) -> dict[str, int]:
    """The one symbol in the size of a storage that has no value yet: the least with which it has `actual` bytes."""
    expr = sympy.sympify(nbytes.node.expr if isinstance(nbytes, torch.SymInt) else nbytes)
    expr = expr.subs({symbol: values[str(symbol)] for symbol in expr.free_symbols if str(symbol) in values})
    unknown = list(expr.free_symbols)
    if len(unknown) != 1:
        return {}
    slope, rest = expr.coeff(unknown[0], 1), expr.coeff(unknown[0], 0)
    return {str(unknown[0]): int(sympy.ceiling((actual - rest) / slope))} if slope.is_positive else {}


def with_symbolic_batch(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, marked so that Dynamo takes its first dimension as a symbol (an error if the model fixes it)."""
    if tensor.ndim:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensor


@contextlib.contextmanager
def retracing(example_inputs: Sequence[Any]) -> Iterator[None]:
    """What AOTAutograd needs of Dynamo around it, when a graph that Dynamo captured before is compiled again."""
    with tracing(TracingContext(detect_fake_mode(example_inputs))):
        yield


class AotTrace:
    """What AOTAutograd traced of one graph, so that another partition of it is compiled without tracing again."""

    def __init__(self) -> None:
        self._made: tuple[Any, Any, fx.GraphModule, Sequence[Any]] | None = None

    @property
    def is_recorded(self) -> bool:
        return self._made is not None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what is traced inside."""
        second_stage: Any = getattr(aot, "aot_stage2_compile", None)
        if second_stage is None:
            yield
            return

        def keep(state: Any, captured: Any, partition_fn: Any, *compilers: Any) -> Any:
            if state.needs_autograd:
                kept = dataclasses.replace(captured, graph_module=_copied(captured.graph_module))
                self._made = copy.copy(state), kept, _own_containers(state.fw_metadata), compilers
            return second_stage(state, captured, partition_fn, *compilers)

        with unittest.mock.patch.object(aot, "aot_stage2_compile", keep):
            yield

    def compiled(self, partition_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Code that runs what `partition_fn` makes of the joint graph."""
        assert self._made is not None
        state, captured, metadata, compilers = self._made
        state, captured = copy.copy(state), dataclasses.replace(captured, graph_module=_copied(captured.graph_module))
        state.fw_metadata = _own_containers(metadata)
        second_stage: Any = aot.__dict__["aot_stage2_compile"]
        mode = fake_mode_of(captured.graph_module.graph.nodes)  # not that of another capture
        with contextlib.ExitStack() as stack:
            stack.enter_context(tracing(TracingContext(mode)))
            if mode is not None:
                stack.enter_context(mode)
                if mode.shape_env is not None:
                    stack.enter_context(enable_python_dispatcher())
            run, _ = second_stage(state, captured, partition_fn, *compilers)

        def forward(*args: Any) -> Any:
            return run(list(args))

        return forward


def _own_containers(value: Any) -> Any:
    """A copy of `value` whose lists, dicts and sets can be changed apart from it."""
    made = copy.copy(value)
    for name, held in vars(value).items():
        if isinstance(held, (list, dict, set)):
            made.__dict__[name] = copy.copy(held)
    return made


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """`module` with a graph of its own: the same nodes, whose metadata can be changed apart."""
    graph = fx.Graph()
    found: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    value, output = found
    graph.output(value).meta = copy.copy(output.meta)
    made = fx.GraphModule(module, graph)
    made.meta = dict(module.meta)
    return made


def min_cut_partition(
    joint: fx.GraphModule, num_forward_outputs: int, static_indices: Sequence[int], budget: float
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's min-cut partitioner with `activation_memory_budget=budget` in [0, 1]: what the benches compare with."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition as split

    with functorch_config.patch(activation_memory_budget=budget):
        halves: tuple[fx.GraphModule, fx.GraphModule] = split(
            joint, None, num_fwd_outputs=num_forward_outputs, static_lifetime_input_indices=list(static_indices)
        )
    return halves


def default_store() -> Any:
    """The key-value store of the default process group; None where there is none."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Did `torch.distributed.fsdp.fully_shard` (FSDP2) take this module?"""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def shard_bytes(module: torch.nn.Module) -> int:
    """Bytes of the shards that FSDP2 holds of parameters that are whole at the moment."""
    if not is_fully_sharded(module):
        return 0
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    parameters = group.fsdp_params if group is not None else ()
    return sum(p._sharded_param_data.nbytes for p in parameters if p.sharded_state.name == "UNSHARDED")


def pipelining() -> Any:
    """torch.distributed.pipelining's schedules module: `_PipelineScheduleRuntime`, `_Action`, `_batch_p2p`, ..."""
    from torch.distributed.pipelining import schedules

    return schedules


def flatten_with_spec(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any]:
    """As `flatten`, and the structure as something that can be compared and hashed."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(tree)
    return leaves, lambda new: tree_unflatten(new, spec), repr(spec)


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Leaves of a nested structure, and what builds the same structure from other leaves."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten(tree)
    return leaves, lambda new: tree_unflatten(new, spec)


def fake_inputs(module: fx.GraphModule) -> list[Any]:
    """The fake tensors and sizes that stand for the inputs of a graph that Dynamo captured."""
    return [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]


def with_transfers(rows: Sequence[Sequence[str]], rank_of: Sequence[int]) -> list[list[tuple[int, str, int]]]:
    """A compute-only pipeline schedule, its action names by rank, with the sends and receives torch's runtime adds.

    Actions are (stage, kind, microbatch), kinds as torch names them: "F", "B", "I", "W", "SEND_F", "RECV_B", ...
    """
    from torch.distributed.pipelining import schedules

    actions: dict[int, list[Any]] = {
        rank: schedules._add_unshard_reshard([schedules._Action.from_str(name) for name in row])
        for rank, row in enumerate(rows)
    }
    count = 1 + max(a.microbatch_index for row in actions.values() for a in row if a.microbatch_index is not None)
    actions = {rank: schedules._add_reduce_grad(row, count) for rank, row in actions.items()}
    order = schedules._add_send_recv(actions, stage_to_rank=lambda s: rank_of[s], num_stages=len(rank_of))
    return [transfers_of(order[rank]) for rank in sorted(order)]


def transfers_of(actions: Iterable[Any]) -> list[tuple[int, str, int]]:
    """torch's pipeline actions as (stage, kind, microbatch), overlapped ones one after the other, no others."""
    flat = [part for action in actions for part in (action.sub_actions or (action,))]
    chosen = (a for a in flat if a.microbatch_index is not None)
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in chosen]


def version(tensor: torch.Tensor) -> int:
    """How often `tensor`, or what it shares memory with, was written to in place; an inference tensor has no count."""
    return -1 if tensor.is_inference() else tensor._version


def write_back(tensor: torch.Tensor, value: torch.Tensor, version: int) -> None:
    """Give `tensor` the bytes and the version counter that it once had: autograd sees no change."""
    tensor.detach().data.copy_(value)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


InsteadOfBackward = Callable[[Any, Callable[..., Any], list[Any]], Any]
"""(node, compiled backward, gradients of the outputs) -> gradients of the inputs. The list may be emptied."""


def replace_backward(node: Any, instead: InsteadOfBackward) -> None:
    """Let `instead` run for the autograd node of a call of compiled code; `compiled(grads)` is what would have run."""
    node.fxmem_backward = instead
    kind = type(node)._forward_cls
    if hasattr(kind, "fxmem_compiled_backward"):
        return
    compiled = kind.fxmem_compiled_backward = kind.backward
    is_boxed = getattr(kind, "boxed_grads_call", False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        def run(of_outputs: list[Any]) -> Any:
            return compiled(ctx, of_outputs) if is_boxed else compiled(ctx, *of_outputs)

        found = getattr(ctx, "fxmem_backward", None)
        of_outputs = grads[0] if is_boxed else list(grads)
        del grads
        return run(of_outputs) if found is None else found(ctx, run, of_outputs)

    kind.backward = staticmethod(backward)


def autocast_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes a context in which autocast is as it is now."""
    then = autocast_state()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for (kind, enabled, dtype), now in zip(then, autocast_state(), strict=True):
                if now != (kind, enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    return restored


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Of each type of device: is autocast on, and to which dtype?"""
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda"))


def fakes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A fake of each tensor, all of one mode and of fixed sizes; fakes are themselves."""
    mode = detect_fake_mode(list(tensors)) or FakeTensorMode(allow_non_fake_inputs=True)
    return [t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True) for t in tensors]


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
