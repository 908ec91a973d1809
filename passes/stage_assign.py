"""Which pipeline stage every node of a joint graph runs in: facts only, nothing is edited here.

Forward ops are cut by their order. Backward ops follow the forward op whose gradient they compute, as far as
dependencies allow: gradients flow from later stages to earlier ones. Some nodes have no place of their own
(*floating*): what depends on nothing but inputs and constants (masks, position ids, rotary tables) or is a view of a
parameter is made again in every stage that reads it, and so are views where their base is no larger than they are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.capture.draws import state_name
from fxmem.capture.effects import is_collective, is_random
from fxmem.capture.overwritten import written_args
from fxmem.errors import FxmemError, OptionError

Cuts: TypeAlias = Sequence[int] | Mapping[int, int]
"""Indices of the ops that begin stages 1, 2, ... (their positions among the nodes of the graph, so the indices of its
Program); or the stage of every forward op by its index, never falling."""

Homes: TypeAlias = Mapping[fx.Node, int]
"""The stage of every forward op as the order says, never falling."""

_HEAVY = ("mm", "convolution", "attention", "linear", "embedding", "fft", "sort", "lstm", "gru", "rnn")


class CutError(FxmemError):
    """The model can't be cut there; the message says which value or buffer is in the way."""


@dataclass(frozen=True)
class Staging:
    """`home`: the stage of every op that is not floating, and the stage a floating one was written for. `floating`:
    nodes that run wherever they are read. `terms`: for each input that gets a gradient, the nodes whose sum it is; each
    is computed in its own stage.
    """

    joint: JointGraph
    num_stages: int
    home: Mapping[fx.Node, int]
    floating: frozenset[fx.Node]
    terms: Mapping[fx.Node, tuple[fx.Node, ...]]

    @cached_property
    def forward(self) -> frozenset[fx.Node]:
        return frozenset(self.joint.nodes[: self.joint.num_forward_nodes])

    def sources(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """What must be at hand to have `nodes`: themselves, or what the floating ones among them are made of."""
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.floating:
                todo.extend(node.all_input_nodes)
            else:
                found.add(node)
        return found

    @cached_property
    def consumers(self) -> Mapping[fx.Node, frozenset[int]]:
        """For every op that is not floating: the stages that read its value, directly or through floating nodes."""
        readers: dict[fx.Node, set[int]] = defaultdict(set)
        dropped = self.dropped
        for node in self.joint.nodes:
            if node in self.home and node not in self.floating and node not in dropped:
                for source in self.sources(node.all_input_nodes):
                    readers[source].add(self.home[node])
        returned = [r for r in self.joint.outputs[: self.joint.num_forward_outputs] if isinstance(r, fx.Node)]
        for source in self.sources(returned):
            readers[source].add(self.num_stages - 1)
        for terms in self.terms.values():
            for term in terms:
                for source in self.sources([term]):
                    readers[source].add(self.home[term])
        return {node: frozenset(stages) for node, stages in readers.items() if node.op == "call_function"}

    @property
    def torn_buffers(self) -> Iterator[tuple[fx.Node, set[int]]]:
        """Buffers that the step overwrites and several stages use: one would read another microbatch's value."""
        overwritten = set(self.joint.mutated_inputs)
        for buffer in (n for n in self.joint.nodes if n.name in overwritten):
            stages = {self.home[n] for n in buffer.users if n in self.home and n not in self.floating}
            if len(stages) > 1:
                yield buffer, stages

    @cached_property
    def dropped(self) -> frozenset[fx.Node]:
        """Additions of gradient terms of several stages: each stage keeps its own term instead."""
        found: set[fx.Node] = set()
        gradients = gradients_of(self.joint)
        for trained, terms in self.terms.items():
            gradient = gradients[trained]
            todo = [gradient] if gradient not in terms else []
            while todo:
                node = todo.pop()
                found.add(node)
                todo.extend(n for n in node.all_input_nodes if n not in terms)
        return frozenset(found)


def gradients_of(joint: JointGraph) -> dict[fx.Node, fx.Node]:
    """Forward input -> the node of its gradient, for those that get one."""
    inputs = [n for n in joint.nodes[: joint.num_forward_nodes] if n.op == "placeholder"]
    results = joint.outputs[joint.num_forward_outputs :]
    return {i: r for i, r in zip(inputs, results, strict=False) if isinstance(r, fx.Node)}


def assign_stages(joint: JointGraph, cuts: Cuts, *, may_share_buffers: bool = False) -> Staging:
    """Decide where every node of `joint` runs.

    Raises OptionError for cuts that are not increasing positions of forward ops, CutError (unless `may_share_buffers`)
    where a buffer that the step overwrites would be needed by two stages.
    """
    stages = stage_by_position(joint, cuts)
    staging = assign_homes(joint, stages, max(stages.values(), default=0) + 1)
    for buffer, where in () if may_share_buffers else staging.torn_buffers:
        raise CutError(
            f"{joint.names.get(buffer.name, buffer.name)} is overwritten in every step and used in stages "
            f"{sorted(where)}: cut elsewhere, so that one stage has all of its uses"
        )
    return staging


def assign_homes(joint: JointGraph, stages: Homes, num_stages: int, pinned: Homes | None = None) -> Staging:
    """Where every node of `joint` runs, some of the `num_stages` stages perhaps empty, some ops `pinned` to a stage."""
    return _Assigner(joint, stages, num_stages, pinned or {}).run()


class _Assigner:
    """Forward homes, then backward homes, then which views float."""

    def __init__(self, joint: JointGraph, stages: Homes, num_stages: int, pinned: Homes) -> None:
        self.joint = joint
        self.nodes = joint.nodes
        self.forward = self.nodes[: joint.num_forward_nodes]
        self.backward = self.nodes[joint.num_forward_nodes :]
        self.by_position, self.num_stages, self.pinned = stages, num_stages, pinned
        self.home: dict[fx.Node, int] = {}
        self.floating: set[fx.Node] = set()
        self.overwritten = {n for n in self.forward if n.name in set(joint.mutated_inputs)}

    def run(self) -> Staging:
        self._place_forward()
        self._place_backward()
        self._float_views()
        terms = {i: tuple(self._terms(g)) for i, g in gradients_of(self.joint).items()}
        return Staging(self.joint, self.num_stages, self.home, frozenset(self.floating), terms)

    # forward

    def _place_forward(self) -> None:
        late = _unread_in_forward(self.forward, self.joint)
        for node in self.forward:
            if node.op == "get_attr" or (node.op == "call_function" and self._is_free(node)):
                self.floating.add(node)
            if node.op != "call_function":
                continue
            earlier = [self.home[n] for n in node.all_input_nodes if n in self.home and n not in self.floating]
            if node in self.pinned:
                self.home[node] = self.pinned[node]
            elif node.target is operator.getitem:
                self.home[node] = self.home[node.all_input_nodes[0]]
            elif written_args(node) or (node in late and earlier):
                self.home[node] = max(earlier, default=self.by_position[node])
            else:
                self.home[node] = max([self.by_position[node], *earlier])
        drawing = {state_name(node): self.home[node] for node in self.home}
        self.home.update({node: drawing[node.name] for node in self.home if node.name in drawing})

    def _is_free(self, node: fx.Node) -> bool:
        """Can every stage make this value for itself, from inputs and constants?"""
        if is_random(node) or is_collective(node) or written_args(node) or node in self.pinned:
            return False
        if all(n in self.floating or self._is_given(n) for n in node.all_input_nodes):
            return not any(word in str(node.target) for word in _HEAVY)
        base = view_base(node)
        return base is not None and (
            base in self.floating or (base.op == "placeholder" and base not in self.overwritten)
        )

    def _is_given(self, node: fx.Node) -> bool:
        """Is this an input that every stage can have: data, constants, buffers that nobody writes?"""
        if node.op == "get_attr":
            return True
        return node.op == "placeholder" and node not in self.overwritten and node not in self._trained

    @cached_property
    def _trained(self) -> set[fx.Node]:
        return set(gradients_of(self.joint))

    # backward

    def _place_backward(self) -> None:
        of_sequence: dict[object, int] = {}
        for node in self.forward:
            number = node.meta.get("seq_nr")
            if number is not None and node in self.home and node not in self.floating:
                of_sequence.setdefault(number, self.home[node])
        backward, gradient_of = set(self.backward), self._stages_of_gradients()
        for node in self.backward:
            if node.op == "placeholder":
                self.home[node] = self.num_stages - 1
            elif node.target is operator.getitem:
                self.home[node] = self.home[node.all_input_nodes[0]]
                if node.all_input_nodes[0] in self.floating:
                    self.floating.add(node)
            elif self._is_free(node):
                self.floating.add(node)
                self.home[node] = of_sequence.get(node.meta.get("seq_nr"), 0)
            else:
                own = of_sequence.get(node.meta.get("seq_nr"))
                self.home[node] = self._backward_home(node, backward, own, gradient_of.get(node, frozenset()))

    def _stages_of_gradients(self) -> dict[fx.Node, frozenset[int]]:
        """Backward op that only makes gradients of inputs of the graph -> the stages that read those inputs in forward.

        The ops of one forward op may lie on both sides of a cut: a custom function that reads its weight before and its
        bias after it.
        """
        staging = Staging(self.joint, self.num_stages, self.home, frozenset(self.floating), {})
        readers: dict[fx.Node, set[int]] = defaultdict(set)
        for node in self.forward:
            if node in self.home and node not in self.floating:
                for source in staging.sources(node.all_input_nodes):
                    readers[source].add(self.home[node])
        serves: dict[fx.Node, frozenset[int]] = {}
        for trained, gradient in gradients_of(self.joint).items():
            serves[gradient] = serves.get(gradient, frozenset()) | readers[trained]
        for node in reversed(self.backward):
            users, number = [user for user in node.users if user.op != "output"], node.meta.get("seq_nr")
            if all(user in serves and user.meta.get("seq_nr") == number is not None for user in users):
                serves[node] = serves.get(node, frozenset()).union(*(serves[user] for user in users))
            else:
                serves.pop(node, None)
        return serves

    def _backward_home(
        self, node: fx.Node, backward: set[fx.Node], own: int | None, gradient_of: frozenset[int]
    ) -> int:
        """The stage of the forward op it belongs to (`own`), or of the latest forward value it reads; but for what only
        makes gradients one that reads the parameter (`gradient_of`). Not after its inputs.
        """
        placed = [n for n in node.all_input_nodes if n in self.home and n not in self.floating]
        limit = min((self.home[n] for n in placed if n in backward), default=self.num_stages - 1)
        if node in self.pinned:
            return min(limit, self.pinned[node])
        reads = [self.home[n] for n in placed if n not in backward]
        if own not in gradient_of and any(stage <= limit for stage in gradient_of):
            return max(stage for stage in gradient_of if stage <= limit)
        wanted = [*reads] if own is None else [*reads, own]
        return min(limit, max(wanted, default=limit))

    def _terms(self, node: fx.Node) -> Iterator[fx.Node]:
        """The terms of a sum of gradients, taken apart down to what one stage computes by itself."""
        if self._is_sum(node) and len({self.home[n] for n in _leaves(node, self._is_sum)}) > 1:
            for part in node.all_input_nodes:
                yield from self._terms(part)
        else:
            yield node

    def _is_sum(self, node: fx.Node) -> bool:
        tensors = node.all_input_nodes
        return (
            node.target is torch.ops.aten.add.Tensor
            and len(tensors) == 2
            and not node.kwargs
            and len(node.users) == 1
            and all(n in self.home and n.meta["val"].shape == node.meta["val"].shape for n in tensors)
        )

    # views

    def _float_views(self) -> None:
        """Let views float whose base crosses a cut anyway or is no larger than the views that cross."""
        consumers = Staging(self.joint, self.num_stages, self.home, frozenset(self.floating), {}).consumers
        crossing = {n for n, stages in consumers.items() if stages - {self.home[n]}}
        views: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            base = view_root(node)
            if base is not None and node not in self.floating and base not in self.floating and base in self.home:
                views[base].append(node)
        for base, members in views.items():
            outside = [n for n in members if n in crossing]
            if outside and (base in crossing or sum(map(num_bytes, outside)) >= num_bytes(base)):
                self.floating.update(m for n in outside for m in _chain(n, base))


def stage_by_position(joint: JointGraph, cuts: Cuts) -> Homes:
    """Stage of every forward op as the order says. Raises OptionError for cuts that make no sense."""
    forward = joint.nodes[: joint.num_forward_nodes]
    ops = [(i, n) for i, n in enumerate(forward) if n.op == "call_function"]
    if isinstance(cuts, Mapping):
        stages = [cuts.get(i, -1) for i, _ in ops]
        steps = {b - a for a, b in zip([0, *stages], stages, strict=False)}
        if not steps <= {0, 1}:
            raise OptionError("stages must rise by one at a time over the forward ops, each of which needs one")
        return {n: stage for (_, n), stage in zip(ops, stages, strict=True)}
    first, last = (ops[0][0], ops[-1][0]) if ops else (0, 0)
    if list(cuts) != sorted(set(cuts)) or any(not first < cut <= last for cut in cuts):
        raise OptionError(f"cuts must be increasing indices of forward ops in {first + 1}..{last}, not {list(cuts)}")
    return {n: sum(cut <= i for cut in cuts) for i, n in ops}


def view_base(node: fx.Node) -> fx.Node | None:
    """The argument that `node` is a view of (for a getitem: the op it takes a value from); None for other ops."""
    if node.op != "call_function" or written_args(node):
        return None
    if node.target is operator.getitem:
        parent = node.all_input_nodes[0]
        return parent if view_base(parent) is not None else None
    own = compat.storage_keys(node)
    if len(own) != 1:
        return None
    return next((n for n in node.all_input_nodes if compat.storage_keys(n) == own), None)


def view_root(node: fx.Node) -> fx.Node | None:
    """The op that owns what `node` is a view of, within the same region; None if it is no view of an op."""
    base, found = view_base(node), None
    while base is not None and base.op == "call_function":
        found = base
        base = view_base(base)
    return found


def num_bytes(node: fx.Node) -> int:
    """Bytes of the values of `node`, each counted dense."""
    return sum(t.numel() * t.itemsize for t in compat.tensors_of(node))


def _chain(node: fx.Node, root: fx.Node) -> Iterator[fx.Node]:
    """`node` and the views between it and `root`."""
    current: fx.Node | None = node
    while current is not None and current is not root:
        yield current
        current = view_base(current)


def _leaves(node: fx.Node, is_sum: object) -> Iterator[fx.Node]:
    for part in node.all_input_nodes:
        if callable(is_sum) and is_sum(part):
            yield from _leaves(part, is_sum)
        else:
            yield part


def _unread_in_forward(forward: Sequence[fx.Node], joint: JointGraph) -> set[fx.Node]:
    """Forward ops that only backward and updates of inputs read, where running them earlier changes nothing."""
    returned = {r for r in joint.outputs if isinstance(r, fx.Node)}
    in_forward, found = set(forward), set[fx.Node]()
    for node in reversed(forward):
        if node.op != "call_function" or node in returned or is_random(node) or is_collective(node):
            continue
        in_time = (user in found or user not in in_forward or bool(written_args(user)) for user in node.users)
        if not written_args(node) and all(in_time):
            found.add(node)
    return found
