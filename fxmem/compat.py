"""Every private torch name that fxmem uses, in one place, so that a new torch release breaks one file."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    InputMutationAOTOutput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.utils._python_dispatch import _disable_current_modes as no_modes
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "BackendCompilerFailed",
    "BoxedCodeGen",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "PlainAOTInput",
    "TangentAOTInput",
    "TorchDynamoException",
    "Unsupported",
    "aot_autograd",
    "current_fake_mode",
    "default_partition",
    "fake_in_current_mode",
    "isolated_compile",
    "innermost_user_frame",
    "no_aot_cache",
    "no_modes",
    "placeholder_source",
    "quiet_dynamo",
    "storage_key",
    "storage_nbytes",
    "tree_leaves",
    "tree_map_only",
    "unset_fake_temporarily",
]


def current_fake_mode() -> FakeTensorMode | None:
    """The FakeTensorMode of the compilation in progress, if any."""
    mode: FakeTensorMode | None = detect_fake_mode()
    return mode


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
    from functorch.compile import default_partition as split

    halves: tuple[fx.GraphModule, fx.GraphModule] = split(
        joint, None, num_fwd_outputs=num_forward_outputs, static_lifetime_input_indices=list(static_indices)
    )
    return halves


def no_aot_cache() -> contextlib.AbstractContextManager[None]:
    """AOTAutograd's cache off: its key knows the graph but not the budget, so it would return another plan's code."""
    manager: contextlib.AbstractContextManager[None] = functorch_config.patch(
        enable_autograd_cache=False, force_autograd_cache=False
    )
    return manager


def isolated_compile(function: Callable[..., Any], backend: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`torch.compile` with its own set of compiled entries, where torch can do that.

    Otherwise several compilations of one model (a sweep over budgets) share one recompile limit, after which
    Dynamo falls back to eager: that is, runs over the budget without a word.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        options["isolate_recompiles"] = True
    compiled: Callable[..., Any] = torch.compile(function, backend=backend, **options)
    return compiled


@contextlib.contextmanager
def quiet_dynamo(dynamic: bool) -> Iterator[None]:
    """Dynamo without memory: sizes seen here don't make a later compilation dynamic, errors are not swallowed."""
    changes = {
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
    """Identity of the storage that `tensor` is a view of; valid while that storage lives."""
    return tensor.untyped_storage()._cdata


def storage_nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the storage that `tensor` is a view of."""
    nbytes: int | torch.SymInt = tensor.untyped_storage().nbytes()
    return nbytes


def innermost_user_frame(error: BaseException) -> str | None:
    """'file:line: code' of the user's line that Dynamo was tracing when it failed, if it knows."""
    stack: Sequence[Any] = getattr(error, "real_stack", None) or ()
    if not stack:
        return None
    frame = stack[-1]
    return f"{frame.filename}:{frame.lineno}: {frame.line}"
