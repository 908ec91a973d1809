"""AOTAutograd: joint graphs, what their inputs and outputs are, partitioners, what it traced kept for another plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import aot_autograd as aot
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import graph_capture, graph_compile, runtime_wrappers
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput, SavedForBackwardsNoVcCheckAOTOutput
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import default_partition as _default_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from fxmem.compat.fake_tensors import fake_mode_of
from fxmem.compat.graphs import module_of_graph


def aot_export_joint(
    stack: contextlib.ExitStack, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.GraphModule:
    """AOTAutograd's joint graph of a module, inputs and outputs described by ``meta["desc"]``; no decompositions."""
    with_sources = functools.partial(make_fx, record_stack_traces=True)  # AOTAutograd relies on Dynamo for these
    with unittest.mock.patch.object(graph_capture, "make_fx", with_sources):
        joint = aot_export_joint_with_descriptors(stack, module, args, kwargs, keep_inference_input_mutations=True)
    return joint.graph_module


def default_partition(
    joint: fx.GraphModule, num_forward_outputs: int, static_indices: Sequence[int] = ()
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own split of a joint graph, which saves everything that backward reads: the step without a plan."""
    halves: tuple[fx.GraphModule, fx.GraphModule] = _default_partition(
        joint, None, num_fwd_outputs=num_forward_outputs, static_lifetime_input_indices=list(static_indices)
    )
    return halves


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


def saved_description(index: int, is_unchecked: bool) -> Any:
    """AOTAutograd's note on the `index`-th value that forward saves for backward."""
    return SavedForBackwardsNoVcCheckAOTOutput(index) if is_unchecked else SavedForBackwardsAOTOutput(index)


def no_aot_cache() -> contextlib.AbstractContextManager[None]:
    """AOTAutograd's cache off: its key knows the graph but not the budget, so it would return another plan's code."""
    manager: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, force_autograd_cache=False
    )
    return manager


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
    made = module_of_graph(module, graph)
    made.meta = dict(module.meta)
    return made
