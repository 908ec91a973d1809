"""The stages of another graph of the same model (other shapes, evaluation), where each stage holds what it held before.

A stage may need a parameter or buffer that it does not hold: one that a branch reads which the first graph did not
take, or a counter that training passes on and evaluation reads. Its value then travels like any other: an op copies it
in a stage that holds it, and a gradient is brought back by another op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.capture.overwritten import written_args
from fxmem.passes.stage_assign import CutError, Homes, Staging, assign_homes, gradients_of
from fxmem.passes.stage_split import StageGraph, slice_stages

Holders = Mapping[str, frozenset[int]]
"""Name of a parameter or buffer (as in `JointGraph.names`) -> the stages that may read it."""


def split_held(joint: JointGraph, stages: Homes, num_stages: int, holders: Holders) -> tuple[StageGraph, ...]:
    """Stages of `joint`, whose ops are in `stages`, none reading or training what it does not hold.

    `joint` is rewritten in place; a stage may come out empty. Raises CutError where a buffer is overwritten in a stage
    that does not hold it, or a gradient is made in a stage before those that hold its parameter.
    """
    allowed = {n: holders[joint.names[n.name]] for n in joint.nodes if n.name in joint.names}
    pinned: dict[fx.Node, int] = {}
    carried: set[fx.Node] = set()
    while True:  # what is carried no longer runs wherever it is read, so that others may be read elsewhere
        staging = assign_homes(joint, stages, num_stages, pinned)
        readers = _readers(staging)
        missing = [n for n in joint.nodes if n in allowed and not readers[n] <= allowed[n]]  # alike on all ranks
        if carried.issuperset(missing):
            break
        for node in (n for n in missing if n not in carried):
            joint = _carry(joint, node, min(allowed[node]), pinned)
        carried.update(missing)
    for buffer, where in staging.torn_buffers:
        name = joint.names.get(buffer.name)
        raise CutError(f"{name} is overwritten, in this shape or mode, in stages {sorted(where)}")
    for node in missing:
        raise CutError(
            f"{joint.names[node.name]} is changed or trained, in this shape or mode, in stages that do not hold "
            f"it (only {sorted(allowed[node])} do): plan for a batch that uses it, or cut elsewhere"
        )
    return slice_stages(staging)


def _readers(staging: Staging) -> dict[fx.Node, set[int]]:
    """Input -> the stages that read or overwrite it or make its gradient."""
    found: dict[fx.Node, set[int]] = defaultdict(set)
    for node in staging.joint.nodes:
        if node in staging.home and node not in staging.floating and node not in staging.dropped:
            for source in staging.sources(node.all_input_nodes):
                if source.op == "placeholder":
                    found[source].add(staging.home[node])
    returned = [r for r in staging.joint.outputs[: staging.joint.num_forward_outputs] if isinstance(r, fx.Node)]
    for source in staging.sources(returned):
        if source.op == "placeholder":
            found[source].add(staging.num_stages - 1)
    for node, terms in staging.terms.items():
        found[node].update(staging.home[term] for term in terms)
    return found


def _carry(joint: JointGraph, node: fx.Node, home: int, pinned: dict[fx.Node, int]) -> JointGraph:
    """Let all but updates of `node` read a copy made in stage `home`, where its gradient is brought, too."""
    graph, gradient = joint.graph_module.graph, gradients_of(joint).get(node)
    readers = [user for user in node.users if user.op != "output" and node not in written_args(user)]
    first = next(n for n in joint.nodes if n.op not in ("placeholder", "get_attr"))
    copy = _copy(graph, node, first)
    pinned[copy] = home
    for reader in readers:
        reader.replace_input_with(node, copy)
    _make_views_again(joint, node)
    if gradient is not None:
        output = graph.output_node()
        brought = _copy(graph, gradient, output)
        pinned[brought] = home
        results, at = list(output.args[0]), joint.num_forward_outputs + _position(joint, node)  # type: ignore[arg-type]
        results[at] = brought
        output.args = (results,)
    return replace(joint, num_forward_nodes=joint.num_forward_nodes + 1)


def _copy(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    with node.meta["val"].fake_mode, torch.no_grad():
        copy.meta["val"] = node.meta["val"].clone()
    return copy


def _make_views_again(joint: JointGraph, node: fx.Node) -> None:
    """Views of `node` are views of its copy now; updates still write to `node` itself."""
    key = compat.storage_key(node.meta["val"])
    with node.meta["val"].fake_mode, torch.no_grad():
        for view in joint.nodes:
            value = view.meta.get("val")
            if view.op != "call_function" or not isinstance(value, torch.Tensor) or written_args(view):
                continue
            if compat.storage_key(value) == key:
                args, kwargs = fx.map_arg((view.args, view.kwargs), lambda n: n.meta["val"])
                view.meta["val"] = view.target(*args, **kwargs)  # type: ignore[operator]


def _position(joint: JointGraph, node: fx.Node) -> int:
    """Which of the forward inputs `node` is."""
    return [n for n in joint.nodes[: joint.num_forward_nodes] if n.op == "placeholder"].index(node)
