"""Gradients leave backward one by one: each is added to its parameter's right after its last use, then dies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxmem import compat

Sink: TypeAlias = Callable[[int, Tensor, bool], None]
"""(position among the stage's gradients, gradient, may its storage be kept?)"""


def deliver(sink: Sink, position: int, gradient: Tensor, is_own: bool) -> None:
    """What the inserted nodes call."""
    sink(position, gradient, is_own)


def with_sink(module: fx.GraphModule, num_sends: int, positions: Sequence[int]) -> fx.GraphModule:
    """`module` with one more input, a `Sink`, which is handed the results after the first `num_sends`.

    Result `num_sends + i` is the gradient at `positions[i]`; later results are returned as before. A gradient's storage
    may be kept if nothing else returned or given lives in it.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results: list[Any] = list(graph.graph_copy(module.graph, copies) or ())  # type: ignore[arg-type]
    end = num_sends + len(positions)
    gradients, others = results[num_sends:end], [*results[:num_sends], *results[end:]]
    nodes = list(graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    taken = {key for n in (*inputs, *others) if isinstance(n, fx.Node) for key in storage_keys(n)}
    keys = [key for g in gradients for key in storage_keys(g)]
    last = _last_use(nodes)
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(None):
        sink = graph.placeholder("sink")
    sink.meta["val"] = None
    for position, gradient in reversed(list(zip(positions, gradients, strict=True))):
        own = set(storage_keys(gradient))
        is_own = not own & taken and all(keys.count(key) == 1 for key in own)
        place = nodes[max(last[key] for key in own)]
        with graph.inserting_after(sink if place.op == "placeholder" else place):
            graph.call_function(deliver, (sink, position, gradient, is_own)).meta["val"] = None
    graph.output(tuple(others))
    graph.lint()
    return compat.module_of_graph(module, graph)


def _last_use(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Storage -> index of the last node that makes or reads a tensor in it."""
    last: dict[int, int] = {}
    for index, node in enumerate(nodes):
        for other in (node, *node.all_input_nodes):
            last |= dict.fromkeys(storage_keys(other), index)
    return last


def storage_keys(node: Any) -> list[int]:
    """Identities of the fake storages that the values of `node` live in."""
    leaves = compat.tree_leaves(node.meta.get("val"))
    return [compat.storage_key(t) for t in leaves if isinstance(t, torch.Tensor)]
