"""`split_backward`: a stage's backward as two modules, input gradients (dI) first and parameter gradients (dW) later.

Zero-bubble schedules send dI upstream at once and fill waiting time with dW (Qi et al. 2023, arXiv:2401.10241). The
split is by dependency: what the values sent upstream need runs in dI, everything else in dW. Gradients that fall out of
dI anyway are returned there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.notes import META, notes
from fxmem.errors import VerifyError
from fxmem.runtime.transfers import ops as _ops  # noqa: F401  (defines fxmem::reload)

PART = "some results"
"""Key in `node.meta[META]` of a node that makes some of the results of the op it was: its workspace is another one."""

_CONVOLUTION = torch.ops.aten.convolution_backward.default
_RELOAD = torch.ops.fxmem.reload.default


@dataclass(frozen=True)
class SplitBackward:
    """`inputs` takes what backward took and returns the values sent upstream, the gradients at positions `early` of
    backward's gradients, and `kept`. `weights` takes backward's arguments at positions `held`, then `kept`, and returns
    the gradients at positions `late`.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    held: tuple[int, ...]
    kept: tuple[str, ...]
    early: tuple[int, ...]
    late: tuple[int, ...]


def split_backward(backward: fx.GraphModule, num_sends: int) -> SplitBackward:
    """Split `backward`, whose first `num_sends` results go upstream and whose others are gradients of parameters.

    Raises VerifyError if it returns fewer values than that.
    """
    graph = _copy(backward.graph)
    _loosen_reloads(graph)
    results = graph.output_node().args[0]
    if not isinstance(results, (tuple, list)) or len(results) < num_sends:
        raise VerifyError(f"backward should return at least {num_sends} values")
    _split_convolutions(graph, [n for n in results[:num_sends] if isinstance(n, fx.Node)])
    sends = [n for n in results[:num_sends] if isinstance(n, fx.Node)]
    gradients = [n for n in results[num_sends:] if isinstance(n, fx.Node)]
    before = _with_parts(_ancestors(sends))
    early = [i for i, n in enumerate(gradients) if n in before]
    late = [i for i, n in enumerate(gradients) if n not in before]
    second = _ancestors(gradients[i] for i in late) - before
    placeholders = graph.find_nodes(op="placeholder")
    read = {n for node in second for n in node.all_input_nodes} | {gradients[i] for i in late}
    held = [n for n in placeholders if n in read]
    kept = [n for n in graph.nodes if n in before and n in read and n.op == "call_function"]
    first_body = [n for n in graph.nodes if n in before]
    second_body = [n for n in graph.nodes if n in second or (n.op == "get_attr" and n in read)]
    return SplitBackward(
        inputs=_extract(backward, placeholders, first_body, [*sends, *(gradients[i] for i in early), *kept]),
        weights=_extract(backward, [*held, *kept], second_body, [gradients[i] for i in late]),
        held=tuple(placeholders.index(n) for n in held),
        kept=tuple(n.name for n in kept),
        early=tuple(early),
        late=tuple(late),
    )


def _loosen_reloads(graph: fx.Graph) -> None:
    """What a reload comes `after` holds it in place where nodes may move; here it would tie one part to the other."""
    for node in graph.find_nodes(op="call_function", target=_RELOAD):
        node.args = (*node.args[:6], None)


def _split_convolutions(graph: fx.Graph, sends: Sequence[fx.Node]) -> None:
    """One `convolution_backward` that makes both kinds of gradients becomes two, by its output mask."""
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        mask = node.args[-1]
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        weights = [index for index in (1, 2) if index in parts and isinstance(mask, (list, tuple)) and mask[index]]
        before = _ancestors(sends)
        if 0 not in parts or parts[0] not in before or not weights or any(parts[i] in before for i in weights):
            continue
        with graph.inserting_before(node):
            clone = graph.node_copy(node)
        _mask(clone, [False, *(i in weights for i in (1, 2))])
        _mask(node, [True, False, False])
        for index in weights:
            parts[index].args = (clone, index)


def _mask(node: fx.Node, mask: Sequence[bool]) -> None:
    """Make only what `mask` says, also in the node's metadata, and note that it is part of an op."""
    node.args = (*node.args[:-1], list(mask))
    node.meta = node.meta | {META: {**notes(node), PART: True}}
    if "val" in node.meta:
        node.meta["val"] = tuple(v if made else None for v, made in zip(node.meta["val"], mask, strict=True))


def _with_parts(nodes: set[fx.Node]) -> set[fx.Node]:
    """`nodes` and what is taken out of those that return several values, so that no whole tuple has to be kept."""
    parts = {user for node in nodes for user in node.users if user.target is operator.getitem}
    return nodes if parts <= nodes else _with_parts(nodes | parts)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and everything computed on the way to them, inputs left out."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen and node.op != "placeholder":
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _copy(source: fx.Graph) -> fx.Graph:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(source, copies)
    graph.output(result)
    return graph


def _extract(
    root: fx.GraphModule, inputs: Iterable[fx.Node], body: Iterable[fx.Node], results: Iterable[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = node.meta
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in results))
    graph.lint()
    return compat.module_of_graph(root, graph)
