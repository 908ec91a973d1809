"""`stage_split`: cut a joint graph into pipeline stages.

The pass reorders the graph by stage, with a `fxmem.stage_boundary` node wherever one stage ends: stages 0, 1, ... in
forward and back again in backward. `slice_stages` then makes one joint graph for each stage. What crosses a cut is
relayed from stage to stage, so that neighbours are all a stage talks to: values forward, gradients backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.errors import VerifyError
from fxmem.passes.base import GraphPass
from fxmem.passes.fakes import on_fakes
from fxmem.passes.stage_assign import CutError, Cuts, Staging, assign_stages

__all__ = ["CutError", "Cuts", "StageGraph", "StageSplit", "Staging", "assign_stages", "slice_stages", "split_stages"]


@torch.library.custom_op("fxmem::stage_boundary", mutates_args=())
def stage_boundary(before: int, after: int) -> None:
    """Marks where stage `before` ends and stage `after` begins; does nothing."""


@stage_boundary.register_fake
def _(before: int, after: int) -> None:
    return None


fx.node.has_side_effect(torch.ops.fxmem.stage_boundary.default)


@dataclass(frozen=True)
class StageGraph:
    """One stage as a joint graph of its own, and what its inputs and outputs are.

    Forward takes `statics`, `data`, `receives` and returns `sends` (the last stage: the outputs of the whole graph).
    Backward takes `grad_receives` (the last stage: the tangents) and returns `grad_sends`, then one gradient for each
    of `gradients`, which names a static input; a name may occur more than once.
    """

    index: int
    num_stages: int
    joint: JointGraph
    statics: tuple[str, ...]
    data: tuple[str, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    grad_receives: tuple[str, ...]
    grad_sends: tuple[str, ...]
    gradients: tuple[str, ...]

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def values(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Fake values of nodes of the stage's graph."""
        return [self._by_name[name] for name in names]

    @cached_property
    def _by_name(self) -> Mapping[str, torch.Tensor]:
        return {node.name: node.meta["val"] for node in self.joint.nodes}


@dataclass(frozen=True)
class StageSplit(GraphPass):
    """Order the nodes by stage and mark the boundaries. `cuts`: see `fxmem.passes.stage_assign.Cuts`."""

    cuts: Cuts = field(default=())

    name: ClassVar[str] = "stage_split"

    def apply(self, joint: JointGraph) -> JointGraph:
        return mark_stages(assign_stages(joint, self.cuts))


def split_stages(joint: JointGraph, cuts: Cuts) -> tuple[StageGraph, ...]:
    """One joint graph for each stage of `joint`. Raises OptionError, CutError."""
    return slice_stages(assign_stages(joint, cuts))


def mark_stages(staging: Staging) -> JointGraph:
    """The whole graph with its nodes in stage order and `fxmem.stage_boundary` nodes between the stages."""
    joint, last = staging.joint, staging.num_stages - 1
    inputs = [n for n in joint.nodes if n in staging.forward and n.op != "call_function"]
    tangents = [n for n in joint.nodes if n not in staging.forward and n.op == "placeholder"]
    forward = _by_stage(staging, [n for n in joint.nodes if n in staging.forward and n.op == "call_function"], 1)
    backward = _by_stage(staging, [n for n in joint.nodes if n not in staging.forward and n.op == "call_function"], -1)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    num_forward = _copy_marked(staging, graph, copies, [*inputs, *forward], range(last + 1))
    _copy_marked(staging, graph, copies, [*tangents, *backward], range(last, -1, -1))
    source = joint.graph_module.graph.output_node()
    graph.output(fx.node.map_arg(source.args[0], copies.__getitem__)).meta = dict(source.meta)
    graph.lint()
    module = compat.module_of_graph(joint.graph_module, graph, "Staged")
    return replace(joint, graph_module=module, num_forward_nodes=num_forward)


def _by_stage(staging: Staging, nodes: Sequence[fx.Node], sign: int) -> list[fx.Node]:
    """Stable order by stage; floating nodes stand with the first stage that reads them, in order."""
    key: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        users = [key[u] for u in node.users if u in key]
        own = sign * staging.home[node]
        key[node] = min([own, *users]) if node not in staging.floating or not users else min(users)
    return sorted(nodes, key=key.__getitem__)


def _copy_marked(
    staging: Staging, graph: fx.Graph, copies: dict[fx.Node, fx.Node], nodes: Sequence[fx.Node], stages: range
) -> int:
    """Copy `nodes`, with markers between stages; returns how many nodes the region has with them."""
    start, current = len(graph.nodes), stages.start
    for node in nodes:
        home = staging.home.get(node, current) if node not in staging.floating else current
        while (home - current) * stages.step > 0:
            _mark(graph, current, current + stages.step)
            current += stages.step
        copies[node] = graph.node_copy(node, copies.__getitem__)
    while current != stages[-1]:
        _mark(graph, current, current + stages.step)
        current += stages.step
    return len(graph.nodes) - start


def _mark(graph: fx.Graph, before: int, after: int) -> None:
    node = graph.call_function(torch.ops.fxmem.stage_boundary.default, (before, after))
    node.meta["val"] = None


def slice_stages(staging: Staging) -> tuple[StageGraph, ...]:
    """One joint graph for each stage."""
    return tuple(_Slicer(staging, index).run() for index in range(staging.num_stages))


class _Slicer:
    """Builds the graph of one stage."""

    def __init__(self, staging: Staging, index: int) -> None:
        self.staging, self.index = staging, index
        self.joint = staging.joint
        self.nodes = self.joint.nodes
        self.static = frozenset(self.joint.static_inputs)
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.is_last = index == staging.num_stages - 1
        forward_outputs = self.joint.outputs[: self.joint.num_forward_outputs]
        self.returned = [r for r in forward_outputs if isinstance(r, fx.Node)]
        self.own_terms = [
            (i, t)
            for i, terms in staging.terms.items()
            for t in terms
            if staging.home[t] == index and self._is_static(i)
        ]

    def run(self) -> StageGraph:
        forward, backward = self._own(in_forward=True), self._own(in_forward=False)
        sends, grad_sends = self._crossing(self.index), self._crossing_back(self.index)
        receives, grad_receives = self._crossing(self.index - 1), self._crossing_back(self.index + 1)
        first = self._needed([*forward, *(self.returned if self.is_last else ())], in_forward=True)
        second = self._needed([*backward, *(t for _, t in self.own_terms)], in_forward=False) - first
        first |= {n for n in second if n.op == "get_attr"}
        needed = first | second | {i for i, _ in self.own_terms}
        inputs = [n for n in self.nodes if n.op == "placeholder" and n in needed and n in self.staging.forward]
        statics = list(dict.fromkeys([*(n for n in inputs if self._is_static(n)), *self._unread()]))
        data = [n for n in inputs if not self._is_static(n)]
        self._place([*statics, *data, *receives])
        self._copy(n for n in self.nodes if n in first and n in self.staging.forward)
        results = self.returned if self.is_last else sends
        num_forward = len(self.graph.nodes)
        tangents = [n for n in self.nodes if n.op == "placeholder" and n not in self.staging.forward]
        self._place(tangents if self.is_last else grad_receives)
        self._copy(n for n in self.nodes if n in second)
        outputs = [*results, *grad_sends, *(t for _, t in self.own_terms)]
        self.graph.output([self.copies[n] for n in outputs])
        return StageGraph(
            index=self.index,
            num_stages=self.staging.num_stages,
            joint=self._joint(len(results), num_forward),
            statics=_names(statics),
            data=_names(data),
            receives=_names(receives),
            sends=() if self.is_last else _names(sends),
            grad_receives=() if self.is_last else _names(grad_receives),
            grad_sends=_names(grad_sends),
            gradients=_names(i for i, _ in self.own_terms),
        )

    def _is_static(self, node: fx.Node) -> bool:
        return node.name in self.static

    def _own(self, in_forward: bool) -> list[fx.Node]:
        staging = self.staging
        return [
            n
            for n in self.nodes
            if n.op == "call_function" and staging.home[n] == self.index and (n in staging.forward) == in_forward
            and n not in staging.floating and n not in staging.dropped
        ]  # fmt: skip

    def _crossing(self, cut: int) -> list[fx.Node]:
        """Forward values that go from stage `cut` to the next, in order."""
        return [
            n
            for n, stages in self._ordered_consumers()
            if n in self.staging.forward and self.staging.home[n] <= cut < max(stages)
        ]

    def _crossing_back(self, cut: int) -> list[fx.Node]:
        """Backward values, and forward ones that backward needs earlier, that go from stage `cut` to the one before."""
        return [n for n, stages in self._ordered_consumers() if self.staging.home[n] >= cut > min(stages)]

    def _ordered_consumers(self) -> Iterator[tuple[fx.Node, frozenset[int]]]:
        consumers = self.staging.consumers
        return ((n, consumers[n]) for n in self.nodes if n in consumers)

    def _needed(self, roots: Iterable[fx.Node], in_forward: bool) -> set[fx.Node]:
        """`roots` of this stage and whatever inputs and floating nodes they are made from."""
        found: set[fx.Node] = set()
        todo = list(roots)
        while todo:
            node = todo.pop()
            is_own = self.staging.home.get(node) == self.index and node not in self.staging.floating
            if node in found or not (is_own or node in self.staging.floating or node.op == "placeholder"):
                continue
            if is_own and (node in self.staging.forward) != in_forward:
                continue
            found.add(node)
            todo.extend(node.all_input_nodes)
        return found

    def _unread(self) -> list[fx.Node]:
        """Parameters and buffers that nothing reads live in the first stage, so that no state is lost."""
        if self.index:
            return []
        return [n for n in self.nodes if self._is_static(n) and not any(u.op != "output" for u in n.users)]

    def _place(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node not in self.copies:
                self.copies[node] = self.graph.placeholder(node.name)
                self.copies[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "desc")}

    def _copy(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            if node.op != "placeholder" and node not in self.copies:
                self.copies[node] = self.graph.node_copy(node, self.copies.__getitem__)

    def _joint(self, num_outputs: int, num_forward: int) -> JointGraph:
        names = {original.name: copy.name for original, copy in self.copies.items()}
        if any(a != b for a, b in names.items()):
            raise VerifyError(f"stage {self.index}: names of nodes changed")
        _refresh_values(self.graph)
        self.graph.lint()
        joint = self.joint
        return replace(
            joint,
            graph_module=compat.module_of_graph(joint.graph_module, self.graph, f"Stage{self.index}"),
            num_forward_outputs=num_outputs,
            num_forward_nodes=num_forward,
            static_inputs=tuple(n for n in joint.static_inputs if n in names),
            names={k: v for k, v in joint.names.items() if k in names},
            mutated_inputs=tuple(n for n in joint.mutated_inputs if n in names),
            sources={k: v for k, v in joint.sources.items() if k in names},
        )


def _refresh_values(graph: fx.Graph) -> None:
    """New fake values where needed: what arrives from another stage is dense and shares no storage with anything."""
    mode = compat.fake_mode_of(graph.nodes)
    arriving = [n for n in graph.nodes if n.op == "placeholder" and "desc" not in n.meta]
    keys = Counter(compat.storage_key(n.meta["val"]) for n in arriving if isinstance(n.meta["val"], torch.Tensor))
    changed: set[fx.Node] = set()
    with on_fakes(mode):
        for node in arriving:
            val = node.meta["val"]
            if isinstance(val, torch.Tensor) and not (keys[compat.storage_key(val)] == 1 and _is_whole(val)):
                node.meta["val"] = torch.empty_like(val)
                changed.add(node)
        for node in graph.nodes:
            if node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)
                changed.add(node)


def _is_whole(val: torch.Tensor) -> bool:
    """Is `val` all of its storage, as `empty_like` would make it?"""
    is_dense = torch.empty_like(val).stride() == val.stride() and not val.storage_offset()
    return is_dense and compat.storage_nbytes(val) == val.numel() * val.itemsize


def _names(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)
