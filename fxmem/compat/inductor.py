"""Inductor with another partitioner than its own."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._ops import OpOverload

from fxmem.compat.aot import no_aot_cache, no_idle_checks, trainable_lstms

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


def _fused_apart(part_of: Callable[[fx.Node], Hashable]) -> Any:
    """Inductor's choices, but no kernel does the work of several parts: these would all have to be there at once."""
    from torch._inductor.virtualized import V

    def parts(node: Any) -> set[Hashable]:
        buffers = [n.node for n in node.get_nodes() if n.node is not None]
        return {part_of(origin) for buffer in buffers for origin in buffer.get_origins()} - {None}

    class Choices(type(V.choices)):  # type: ignore[misc]
        def can_fuse(self, scheduler: Any, one: Any, other: Any, score: Any) -> bool:
            return len(parts(one) | parts(other)) <= 1 and bool(super().can_fuse(scheduler, one, other, score))

    return V.set_choices_handler(Choices())


def _allow_sums_in_place() -> None:
    """Inductor runs these as they are; where the environment says CI it would insist on its own decompositions."""
    from torch._inductor import lowering

    for op in (torch.ops.aten.addmm_.default, torch.ops.aten.baddbmm_.default):
        if op not in lowering.lowerings:
            lowering.make_fallback(op, warn=False)


def compile_with_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    partition: PartitionFn,
    key: str,
    part_of: Callable[[fx.Node], Hashable],
) -> Callable[..., Any]:
    """Inductor with `partition` in place of its own partitioner; `key` is part of the key of its caches.

    `part_of`: the part that a node of a half belongs to (None: no part); nodes of several parts are not fused.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    _allow_sums_in_place()

    def compile_half(half: fx.GraphModule, *args: Any, **options: Any) -> Any:
        """What moves has the strides that the plan saw: no channels-last convolutions, no padded rows beside it."""
        moves = any(_is_transfer(node) for node in half.graph.nodes)
        with config.patch(_PLANNED_LAYOUTS) if moves else contextlib.nullcontext(), _fused_apart(part_of):
            return compile_fx_inner(half, *args, **options)

    patches = {
        "custom_partitioner_fn": _InductorPartitioner(partition, key),
        "reorder_for_peak_memory": False,  # the plan's order is the order: transfers would be moved past each other
    }
    with no_aot_cache(), no_idle_checks(module), trainable_lstms():
        compiled: Any = compile_fx(module, list(example_inputs), compile_half, config_patches=patches)
    run: Callable[..., Any] = compiled
    return run


@contextlib.contextmanager
def auto_chunking() -> Iterator[list[str]]:
    """Inductor with its own way to split a loss on, `auto_chunker`, and without cached code.

    Yields what became of each graph: "chunked", or why it was left alone.
    """
    from torch._inductor import config

    if not hasattr(config, "auto_chunker"):
        yield ["this torch has no auto_chunker"]
        return
    from torch._inductor.fx_passes import auto_chunker
    from torch._inductor.fx_passes.auto_chunker.common import CantChunk

    outcomes: list[str] = []
    chunk = auto_chunker.chunk

    def noted(module: fx.GraphModule) -> fx.GraphModule:
        try:
            made: fx.GraphModule = chunk(module)
        except CantChunk as error:
            outcomes.append(str(error))
            raise
        if made is not module:
            outcomes.append("chunked")
        return made

    patches = {"auto_chunker.enable": True, "fx_graph_cache": False}
    with no_aot_cache(), unittest.mock.patch.object(auto_chunker, "chunk", noted), config.patch(patches):
        yield outcomes
