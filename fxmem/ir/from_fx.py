"""`Program` from a captured joint graph: sizes from fake tensors, effects from the ops' own schemas and tags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.draws import RNG_STATE, state_name
from fxmem.capture.effects import is_collective, is_pure, is_random
from fxmem.capture.hints import checkpoint_of, is_kept
from fxmem.capture.joint import JointGraph, target_name
from fxmem.capture.modules import module_of
from fxmem.capture.notes import notes
from fxmem.capture.overwritten import written_args
from fxmem.errors import CaptureError
from fxmem.ir import sizes
from fxmem.ir.program import Op, Part, Program, Region, Storage


def program_from_joint(joint: JointGraph, name: str = "step") -> Program:
    """The typed view of `joint`: one op per node but the output, in node order; seconds and workspaces are still 0.

    Raises CaptureError for a node of unknown size.
    """
    nodes = joint.nodes
    index = {node: i for i, node in enumerate(nodes)}
    storages = _Storages()
    ids = {node: storages.of(node) for node in nodes}
    last_write = _last_writes(joint, nodes, ids)
    labels = _labels(joint)
    states = {node.name: node for node in nodes if node.target is RNG_STATE}
    kept = {s for node in nodes[: joint.num_forward_nodes] if is_kept(node) for s in ids[node]}
    ops = tuple(_op(joint, node, index, ids, last_write, states, kept, labels.get(node.name, "")) for node in nodes)
    ops = _with_hints(ops, nodes[: joint.num_forward_nodes])
    outputs = joint.outputs
    forward, backward = outputs[: joint.num_forward_outputs], outputs[joint.num_forward_outputs :]
    return Program(
        name=name,
        ops=ops,
        storages=tuple(storages.found),
        forward_outputs=tuple(dict.fromkeys(index[n] for n in forward if isinstance(n, fx.Node))),
        backward_outputs=tuple(dict.fromkeys(index[n] for n in backward if isinstance(n, fx.Node))),
        static=tuple(index[n] for n in nodes if n.name in set(joint.static_inputs)),
        hints=_hints(nodes, storages.found),
    )


class _Storages:
    """Numbers storages in order of first appearance."""

    def __init__(self) -> None:
        self.found: list[Storage] = []
        self._ids: dict[int, int] = {}

    def of(self, node: fx.Node) -> tuple[int, ...]:
        """Storages that the outputs of `node` live in, each once."""
        return tuple(dict.fromkeys(self._id(tensor) for tensor in _tensors(node.meta.get("val"))))

    def _id(self, tensor: torch.Tensor) -> int:
        key = compat.storage_key(tensor)
        if key not in self._ids:
            self._ids[key] = len(self.found)
            nbytes = compat.storage_nbytes(tensor)
            expr = nbytes.node.expr if isinstance(nbytes, torch.SymInt) else nbytes
            self.found.append(Storage(len(self.found), sizes.plain(expr), str(tensor.device)))
        return self._ids[key]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from compat.strided_parts(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _op(
    joint: JointGraph,
    node: fx.Node,
    index: Mapping[fx.Node, int],
    ids: Mapping[fx.Node, tuple[int, ...]],
    last_write: Mapping[int, int],
    states: Mapping[str, fx.Node],
    kept: Set[int],
    label: str,
) -> Op:
    position = index[node]
    region: Region = "forward" if position < joint.num_forward_nodes else "backward"
    if node.op == "call_function" and "val" not in node.meta:
        raise CaptureError(f"op {node.name} ({node.target}) has no known size", joint.sources.get(node.name))
    args = [index[n] for n in node.all_input_nodes]
    mutates = tuple(dict.fromkeys(s for argument in written_args(node) for s in ids[argument]))
    random, collective = is_random(node), is_collective(node)
    state = states.get(state_name(node) or "") if random else None
    once = collective or mutates or not kept.isdisjoint(ids[node]) or not is_pure(node)
    touched = (*ids[node], *(s for n in node.all_input_nodes for s in ids[n]))
    overwritten = any(last_write.get(s, -1) > position for s in touched)
    return Op(
        index=position,
        name=node.name,
        target=target_name(node),
        region=region,
        args=tuple(args if state is None else [*args, index[state]]),
        storages=ids[node],
        is_input=node.op in ("placeholder", "get_attr"),
        mutates=mutates,
        is_random=random,
        is_collective=collective,
        recomputable=not (once or overwritten or (random and state is None)),
        fused=notes(node).get("fused"),
        source=joint.sources.get(node.name, ""),
        label=label,
        module=module_of(node),
        part=_part(node),
    )


def _part(node: fx.Node) -> Part | None:
    found = notes(node)
    return Part(found["part_of"], found["part"], found["fission"]) if "part_of" in found else None


def _with_hints(ops: tuple[Op, ...], forward: Sequence[fx.Node]) -> tuple[Op, ...]:
    """Mark the ops whose results the model's own checkpoints would not save: nothing outside the region reads them."""
    region = [checkpoint_of(node) for node in forward]
    left = {a for op in ops[: len(forward)] for a in op.args if region[a] != region[op.index]}
    leaving = {s for a in left for s in ops[a].storages}
    return tuple(
        replace(op, hint="recompute") if position is not None and leaving.isdisjoint(op.storages) else op
        for op, position in zip(ops, [*region, *(None for _ in ops[len(forward) :])], strict=True)
    )


def _labels(joint: JointGraph) -> dict[str, str]:
    """Node -> what the model calls it: parameters and buffers by their qualified names, their gradients; arguments and
    the gradients of what is returned by their numbers."""
    inputs = [node for node in joint.nodes[: joint.num_forward_nodes] if node.op == "placeholder"]
    arguments = [node.name for node in inputs if node.name not in joint.names]
    labels = {name: f"argument {number}" for number, name in enumerate(arguments)} | dict(joint.names)
    labels |= {name: f"gradient of output {number}" for number, name in enumerate(joint.tangents)}
    for node, gradient in zip(inputs, joint.outputs[joint.num_forward_outputs :], strict=False):
        if isinstance(gradient, fx.Node) and node.name in joint.names:
            labels.setdefault(gradient.name, f"gradient of {joint.names[node.name]}")
    return labels


def _last_writes(joint: JointGraph, nodes: list[fx.Node], ids: Mapping[fx.Node, tuple[int, ...]]) -> dict[int, int]:
    """Storage -> position after which it no longer holds what earlier ops read."""
    last = {s: joint.num_forward_nodes for n in nodes if n.name in set(joint.mutated_inputs) for s in ids[n]}
    for position, node in enumerate(nodes):
        for argument in written_args(node):
            last |= {s: max(position, last.get(s, -1)) for s in ids[argument]}
    return last


def _hints(nodes: list[fx.Node], storages: list[Storage]) -> dict[str, int]:
    """Value at capture of every symbol in a storage's size."""
    used = {str(symbol) for s in storages if not isinstance(s.nbytes, int) for symbol in s.nbytes.free_symbols}
    tensor = next((t for node in nodes for t in _tensors(node.meta.get("val"))), None)
    values = compat.symbol_hints(tensor) if used and tensor is not None else {}
    return {name: values[name] for name in sorted(used & values.keys())}
