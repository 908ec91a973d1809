"""A Dynamo backend that hands each joint graph, in normal form, to a partition function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.errors import capture_errors
from fxmem.capture.joint import JointGraph, from_aot, require_tensors
from fxmem.capture.masked import masked_writes_by_where

Partition = Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]]
"""From a joint graph to (forward, backward) modules by AOTAutograd's convention: forward returns its outputs and then
the values saved for backward (tensors first, sizes last); backward takes sizes, tensors, tangents and returns the
gradients."""

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def boxed(module: fx.GraphModule, example_inputs: Sequence[Any] = ()) -> Callable[[list[Any]], Any]:
    """Run `module` as it is, taking its arguments in a list that it empties: each dies at its last use."""
    module.graph.set_codegen(compat.BoxedCodeGen())
    forward = compat.recompiled(module)

    def run(args: list[Any]) -> Any:
        return forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def make_backend(
    partition: Partition,
    *,
    compiler: Compiler = boxed,
    inference: Callable[[JointGraph], None] | None = None,
    trace: compat.AotTrace | None = None,
) -> Backend:
    """A backend for `torch.compile`: Dynamo -> AOTAutograd without decompositions -> `partition` -> `compiler`.

    `compiler` makes the code of the forward, backward and inference modules. `inference` is told of graphs without
    backward, which otherwise pass through. `trace`: what AOTAutograd traced of the module before, or is to be kept of
    it. Each call returns a new object, so that Dynamo, which keeps compiled code by backend, never returns the code of
    another budget.
    """

    def backend(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        masked_writes_by_where(module)
        is_training = torch.is_grad_enabled()
        sources = [compat.placeholder_source(n) for n in module.graph.find_nodes(op="placeholder")]

        def partition_fn(
            joint: fx.GraphModule,
            joint_inputs: Sequence[Any],
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Sequence[int] | None = None,
            **_: Any,
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            captured = from_aot(joint, num_fwd_outputs, static_lifetime_input_indices or (), sources)
            require_tensors(captured)
            return partition(captured)

        def inference_compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            if is_training:  # a backward inside would run as forward does, by no plan
                compat.break_at_gradients(module)
            if inference is not None:
                (output,) = graph.graph.find_nodes(op="output")
                inference(from_aot(graph, len(output.args[0]), range(len(inputs)), sources))
            return compiler(graph, inputs)

        aot = compat.aot_autograd(
            fw_compiler=compiler,
            bw_compiler=compiler,
            inference_compiler=inference_compiler,
            partition_fn=partition_fn,
            keep_inference_input_mutations=True,
        )
        with (
            compat.no_aot_cache(),
            compat.no_donated_buffers(),
            compat.no_idle_checks(module),
            compat.trainable_lstms(),
            capture_errors(falls_back=True),
        ):
            if trace is not None and trace.is_recorded:
                return trace.compiled(partition_fn)
            with trace.recording() if trace is not None else contextlib.nullcontext():
                compiled: Callable[..., Any] = aot(module, [compat.fake_in_current_mode(x) for x in example_inputs])
        return compiled

    return backend
