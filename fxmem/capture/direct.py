"""Capture without Dynamo: AOTAutograd traces the module's Python itself, under fake tensors.

Several times faster than Dynamo on deep models and indifferent to graph breaks, but Python control flow is followed
blindly (no guards), inputs come in another order (parameters, buffers, arguments), so the plan of such a graph applies
to that graph only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import nn

from fxmem import compat
from fxmem.capture.errors import capture_errors
from fxmem.capture.joint import JointGraph, from_aot, is_tangent
from fxmem.errors import CaptureError


def trace(
    module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mode: compat.FakeTensorMode,
) -> JointGraph:
    """The joint graph of one call of `module`, whose tensors and arguments are fakes of `mode`.

    Raises CaptureError, with the model's line, also for callables that are not modules.
    """
    if not isinstance(module, nn.Module):
        raise CaptureError('frontend="aot" captures nn.Module only; use frontend="dynamo" for other callables')
    with capture_errors(), contextlib.ExitStack() as stack:
        stack.enter_context(compat.no_aot_cache())
        stack.enter_context(compat.trainable_lstms())
        stack.enter_context(compat.seen_as_compiling())
        stack.enter_context(mode)
        graph = compat.aot_export_joint(stack, module, args, kwargs)
    placeholders = graph.graph.find_nodes(op="placeholder")
    inputs = [node for node in placeholders if not is_tangent(node)]
    (output,) = graph.graph.find_nodes(op="output")
    has_backward = len(inputs) < len(placeholders)
    num_outputs = len(output.args[0]) - (len(inputs) if has_backward else 0)
    static = [
        i for i, n in enumerate(inputs) if isinstance(n.meta["desc"], (compat.ParamAOTInput, compat.BufferAOTInput))
    ]
    return from_aot(graph, num_outputs, static)
