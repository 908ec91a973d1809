"""Inputs that the step overwrites (BatchNorm statistics, ``buf.add_(1)``): who reads the old value, and when.

By the time backward runs, the old value is gone. What backward reads of it must be cloned in forward; and a forward op
that reads it could not be recomputed in backward, unless it too reads the clone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx

from fxmem import compat


def written_args(node: fx.Node) -> list[fx.Node]:
    """Arguments that the op overwrites, according to its schema."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.is_mutable:
        return []
    written: list[fx.Node] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            written += [
                n for n in node.all_input_nodes if n is value or (isinstance(value, (list, tuple)) and n in value)
            ]
    return written


def overwritten_inputs(graph: fx.Graph, inputs: Sequence[fx.Node], forward: Sequence[fx.Node]) -> list[fx.Node]:
    """Inputs overwritten at the end of forward: by ops of the graph, or by the runtime from a forward output."""
    by_desc = {n.meta["desc"]: n for n in inputs if n.meta.get("desc") is not None}
    (output,) = graph.find_nodes(op="output")
    mutated = {
        by_desc[desc.mutated_input]: None
        for desc in output.meta.get("desc") or ()
        if isinstance(desc, compat.InputMutationAOTOutput) and desc.mutated_input in by_desc
    }
    owners = {key: n for n in inputs for key in compat.storage_keys(n)}
    for node in forward:
        for argument in written_args(node):
            mutated |= {owners[key]: None for key in compat.storage_keys(argument) if key in owners}
    return list(mutated)


def save_overwritten(graph: fx.Graph, mutated: Sequence[fx.Node], forward: Sequence[fx.Node]) -> int:
    """Clone old values in forward for those who need them (see the module's docstring); returns the number of clones.

    A forward op gets a clone only where that is cheaper than keeping its results, and only if backward depends on it.
    """
    overwritten = {key for n in mutated for key in compat.storage_keys(n)}
    in_forward = set(forward)
    needed = ancestors(n for n in graph.nodes if n.op != "output" and n not in in_forward)
    num_clones = 0
    for node in forward:
        if not overwritten.issuperset(compat.storage_keys(node)) or not compat.storage_keys(node) or written_args(node):
            continue
        readers = [u for u in node.users if _reads_values(u, overwritten)]
        late = [u for u in readers if u not in in_forward]
        early = [u for u in readers if u in in_forward and u in needed and _nbytes(node) < _nbytes(u)]
        if late or early:
            _redirect(graph, node, [*early, *late], anchor=early[0] if early else _first_write(forward))
            num_clones += 1
    return num_clones


def _redirect(graph: fx.Graph, node: fx.Node, readers: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Let `readers` take a clone of `node`, made before `anchor`."""
    with graph.inserting_before(anchor):
        clone = graph.call_function(torch.ops.aten.clone.default, (node,))
    value = node.meta["val"]
    with value.fake_mode:
        clone.meta = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}
        clone.meta |= {"val": value.clone(), "partitioner_tag": "is_forward"}
    for reader in readers:
        reader.replace_input_with(node, clone)


def _reads_values(user: fx.Node, overwritten: set[int]) -> bool:
    """Does `user` need the old bytes: not as the target of a write, nor to make one more view of them?"""
    keys = compat.storage_keys(user)
    return user.op != "output" and not written_args(user) and not (keys and overwritten.issuperset(keys))


def _first_write(forward: Sequence[fx.Node]) -> fx.Node:
    """The first op of forward that overwrites something, or else the node after forward's last."""
    return next((n for n in forward if written_args(n)), forward[-1].next)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they depend on."""
    seen: set[fx.Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _nbytes(node: fx.Node) -> int:
    """Bytes of the storages that the node's values live in, at the sizes seen during capture."""
    return sum({compat.storage_key(t): compat.hint(compat.storage_nbytes(t)) for t in compat.tensors_of(node)}.values())
