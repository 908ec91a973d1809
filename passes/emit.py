"""Schedule -> FX nodes: a new joint graph whose node order *is* the schedule.

`emit` walks a plan's actions over the captured joint graph. What an action type turns into is decided by its handler
(`emits`), so other passes add actions without touching this module. Every emitted node says which region it runs in
(`region_of`); views and getitems are derived again from the instance of their base that is current where they are read.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.capture.draws import replay
from fxmem.capture.notes import META, notes
from fxmem.errors import PlanMismatch, VerifyError
from fxmem.ir.program import Op, Program, Region
from fxmem.passes.fakes import fake_result
from fxmem.schedule.actions import Action, Compute, Recompute, StartBackward

_OF_PARTS = ("part", "parts")

Handler = Callable[["Emitter", Any], None]
A = TypeVar("A")
_HANDLERS: dict[type, Handler] = {}
_SAME_TENSOR = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def emits(action_type: type[A]) -> Callable[[Callable[[Emitter, A], None]], Callable[[Emitter, A], None]]:
    """Register the decorated `handler(emitter, action)` as the one that writes `action_type` into the graph."""

    def register(handler: Callable[[Emitter, A], None]) -> Callable[[Emitter, A], None]:
        _HANDLERS[action_type] = handler
        return handler

    return register


def region_of(node: fx.Node) -> Region | None:
    """Region an emitted node runs in; None for a graph that was not emitted."""
    region: Region | None = notes(node).get("region")
    return region


def part_of(node: fx.Node) -> tuple[int, int] | None:
    """(which part, of how many) of a region that was split; None for what runs whole."""
    note = node.meta.get(META, {})
    return (note["part"], note["parts"]) if "part" in note else None


def emit(
    joint: JointGraph, program: Program, actions: Sequence[Action], state: Mapping[Any, Any] | None = None
) -> JointGraph:
    """Return a new joint graph that runs `actions`; inputs and outputs are those of `joint`, in its order.

    `state`: what handlers find in `Emitter.state`.
    Nodes that no action needs vanish. Raises PlanMismatch if `program` does not describe `joint`, VerifyError for an
    action that cannot be written (unknown type, value not there, reads a storage that was overwritten meanwhile).
    """
    emitter = Emitter(joint, program)
    emitter.state.update(state or {})
    for action in actions:
        handler = _HANDLERS.get(type(action))
        if handler is None:
            known = ", ".join(sorted(cls.__name__ for cls in _HANDLERS))
            raise VerifyError(f"no pass emits {type(action).__name__}; there is one for {known}")
        handler(emitter, action)
    return emitter.finish()


class Emitter:
    """The graph under construction. Handlers use `current`, `rebind`, `call`, `fresh_like`, `region` and `state`.

    `region`: region of the nodes emitted from now on. `state`: scratch space of handlers (keep keys apart by type).
    """

    def __init__(self, joint: JointGraph, program: Program) -> None:
        self.joint, self.program = joint, program
        self.sources = _sources(joint, program)
        self.index_of = {node: index for index, node in enumerate(self.sources)}
        self.graph = fx.Graph()
        self.region: Region = "forward"
        self.state: dict[Any, Any] = {}
        self._lines: dict[fx.Node, str] = {}  # emitted node -> the model's line
        self._forward_results: dict[int, fx.Node] = {}
        self._values: dict[int, fx.Node] = {}  # op -> node that holds its value now
        self._derived: dict[tuple[Any, ...], fx.Node] = {}
        self._named: set[str] = set()
        self._original: set[fx.Node] = set()  # nodes whose meta["val"] is the captured one (same fake storage)
        self._getitems = _getitems(program, self.sources)
        self._scalars = _ScalarQueue(program, self._getitems)
        self._mutated_at: dict[int, int] = {}  # storage -> clock of its last overwrite
        self._ran_at: dict[int, int] = {}  # op -> clock of its first run
        self._fake_mode = compat.fake_mode_of(self.sources)
        self._emit_inputs()

    # what handlers use

    def current(self, storage: int) -> fx.Node:
        """The tensor node that owns `storage` at this point (never a view of it). Raises VerifyError if none does."""
        owner = self.owner(storage)
        if owner not in self._values:
            raise VerifyError(f"storage {storage} ({self.program.ops[owner].name}) is not there to be read")
        return self._values[owner]

    def owner(self, storage: int) -> int:
        """Index of the op whose value is the base tensor of `storage`: its producer, or a getitem of it."""
        producer = self.program.producer[storage]
        for getitem in self._getitems.get(producer, ()):
            if storage in self.program.ops[getitem].storages:
                return getitem
        return producer

    def rebind(self, storage: int, node: fx.Node) -> None:
        """From here on `storage` is read from `node`, a tensor of the same shape, strides and dtype."""
        self._values[self.owner(storage)] = node

    def call(self, target: Callable[..., Any], args: tuple[Any, ...], name: str, val: Any) -> fx.Node:
        """Append a call of `target` in the current region; `val`: its fake value (see `fresh_like`), or None."""
        node = self.graph.create_node("call_function", target, args, {}, name=name)
        node.meta = {"val": val, META: {"region": self.region}}
        return node

    def fresh_like(self, node: fx.Node) -> Any:
        """A fake tensor of `node`'s shape, strides, dtype and device in a storage of its own."""
        val = node.meta["val"]
        with self._fake_mode or nullcontext():
            return torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device=val.device)

    # ops

    def run(self, op: Op, again: bool) -> fx.Node:
        """Emit `op` (a scheduled one) from the present instances of its arguments; its getitems follow at once."""
        self._check_not_overwritten(op, again)
        source = self.sources[op.index]
        node = self._copy(source, "recompute_of" if again else None, self._arguments(source))
        is_fresh = again or (bool(op.mutates) and not self._has_original_arguments(node))
        self._set_value(node, source, is_fresh)
        if again:
            self._replay(node, op)
        if not (again and self._stays(op)):
            self._values[op.index] = node
            self._emit_getitems(op.index, again)
        for scalar in self._scalars.ready_after(op.index):
            self._emit_scalar(scalar)
        return node

    def value(self, index: int) -> fx.Node:
        """Node that holds op `index`'s value here; views are derived now if they are not at hand in this region."""
        if index in self._values:
            return self._values[index]
        op = self.program.ops[index]
        if not self.program.is_folded(op):
            raise VerifyError(f"op {op.name} is read before it is computed")
        source = self.sources[index]
        arguments = self._arguments(source)
        key = (index, self.region, *arguments.values())
        if key not in self._derived:
            is_again = source.name in self._named
            node = self._copy(source, "derived_from" if is_again else None, arguments)
            self._set_value(node, source, not self._has_original_arguments(node))
            self._derived[key] = node
        return self._derived[key]

    def start_backward(self) -> None:
        """Close forward: its outputs are the instances current here; the tangents arrive."""
        self._forward_results = {index: self.value(index) for index in self.program.forward_outputs}
        self.region = "backward"
        self._emit_inputs()

    def finish(self) -> JointGraph:
        """Write the output node, drop views nobody reads, check, and wrap up."""
        if self.region == "forward":
            self.start_backward()
        source = self.joint.graph_module.graph.output_node()
        results = [
            result if not isinstance(result, fx.Node) else self._result(result, position)
            for position, result in enumerate(self.joint.outputs)
        ]
        self.graph.output(tuple(results)).meta = {**source.meta, META: {"region": "backward"}}
        _drop_unread(self.graph)
        self.graph.lint()
        module = compat.module_of_graph(self.joint.graph_module, self.graph, "Joint")
        module.meta = dict(self.joint.graph_module.meta)
        nodes = list(self.graph.nodes)
        return replace(
            self.joint,
            graph_module=module,
            num_forward_nodes=sum(region_of(node) == "forward" for node in nodes),
            sources={node.name: self._lines[node] for node in nodes if node in self._lines},
        )

    # internals

    def _replay(self, node: fx.Node, op: Op) -> None:
        """Let `node`, a second run of `op`, draw what the first one drew."""
        state = self.program.state_op(op)
        if state is not None:
            target: Any = node.target
            node.args = (self.value(state.index), self.sources[state.index].args[0], target, *node.args)
            node.target = replay

    def _result(self, source: fx.Node, position: int) -> fx.Node:
        index = self.index_of[source]
        return self._forward_results[index] if position < self.joint.num_forward_outputs else self.value(index)

    def _emit_inputs(self) -> None:
        for op in self.program.ops:
            if op.is_input and op.region == self.region:
                node = self._copy(self.sources[op.index], None, {})
                self._set_value(node, self.sources[op.index], is_fresh=False)
                self._values[op.index] = node
        for scalar in self._scalars.ready_at_start():
            self._emit_scalar(scalar)

    def _stays(self, op: Op) -> bool:
        """Is all that `op` makes returned? Then readers keep the first instance, and a second one is a transient."""
        return bool(op.storages) and self.program.kept.issuperset(op.storages)

    def _emit_getitems(self, index: int, again: bool) -> None:
        for getitem in self._getitems.get(index, ()):
            if again and self._stays(self.program.ops[getitem]):
                continue
            source = self.sources[getitem]
            node = self._copy(source, "derived_from" if again else None, self._arguments(source))
            self._set_value(node, source, not self._has_original_arguments(node))
            self._values[getitem] = node
            self._emit_getitems(getitem, again)

    def _emit_scalar(self, index: int) -> None:
        source = self.sources[index]
        node = self._copy(source, None, self._arguments(source))
        self._set_value(node, source, is_fresh=False)
        self._values[index] = node

    def _arguments(self, source: fx.Node) -> dict[fx.Node, fx.Node]:
        return {node: self.value(self._behind_aliases(self.index_of[node])) for node in source.all_input_nodes}

    def _behind_aliases(self, index: int) -> int:
        """Autograd's detach and alias make the same tensor again: inside the graph its readers take the original."""
        while self.sources[index].target in _SAME_TENSOR and self.program.is_folded(self.program.ops[index]):
            index = self.program.ops[index].args[0]
        return index

    def _copy(self, source: fx.Node, again: str | None, arguments: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args = fx.node.map_arg(source.args, arguments.__getitem__)
        kwargs = fx.node.map_arg(source.kwargs, arguments.__getitem__)
        name = f"{source.name}_remat" if again else source.name
        node = self.graph.create_node(source.op, source.target, args, kwargs, name, source.type)
        self._named.add(source.name)
        if source.name in self.joint.sources:
            self._lines[node] = self.joint.sources[source.name]
        kept = {key: value for key, value in source.meta.get(META, {}).items() if key in _OF_PARTS}
        note = kept | {"region": self.region} | ({again: source.name} if again else {})
        node.meta = {**source.meta, "partitioner_tag": f"is_{self.region}", META: note}
        return node

    def _set_value(self, node: fx.Node, source: fx.Node, is_fresh: bool) -> None:
        """A rerun's fake value must live in its own fake storage, else it would look like an alias of the first run."""
        if not is_fresh:
            self._original.add(node)
            return
        node.meta["val"] = fake_result(source.target, node, self._fake_mode)

    def _has_original_arguments(self, node: fx.Node) -> bool:
        return self._original.issuperset(node.all_input_nodes)

    def _check_not_overwritten(self, op: Op, again: bool) -> None:
        clock = len(self.graph.nodes)
        first = self._ran_at.setdefault(op.index, clock)
        overwritten = [s for s in self.program.reads(op) if self._mutated_at.get(s, -1) > first]
        if again and overwritten:
            raise VerifyError(f"{op.name} runs again after storage {overwritten[0]}, which it reads, was overwritten")
        self._mutated_at.update((s, clock) for s in op.mutates)


class _ScalarQueue:
    """Scalar ops (no storages: sizes, asserts) by when the last scheduled op they depend on has run."""

    def __init__(self, program: Program, getitems: Mapping[int, Sequence[int]]) -> None:
        taken = {g for group in getitems.values() for g in group}
        self._needs: dict[int, set[int]] = {}
        roots: list[frozenset[int]] = []
        for op in program.ops:
            below = frozenset().union(*(roots[arg] for arg in op.args))
            is_scheduled = not program.is_folded(op)
            roots.append(frozenset() if op.is_input else frozenset({op.index}) if is_scheduled else below)
            if not op.storages and not is_scheduled and op.index not in taken:
                self._needs[op.index] = set(below)

    def ready_at_start(self) -> list[int]:
        return self._pop()

    def ready_after(self, index: int) -> list[int]:
        for needs in self._needs.values():
            needs.discard(index)
        return self._pop()

    def _pop(self) -> list[int]:
        ready = [index for index, needs in self._needs.items() if not needs]
        for index in ready:
            del self._needs[index]
        return ready


@emits(Compute)
def _emit_compute(emitter: Emitter, action: Compute) -> None:
    op = emitter.program.ops[action.op]
    if not op.is_input:
        emitter.run(op, again=False)


@emits(Recompute)
def _emit_recompute(emitter: Emitter, action: Recompute) -> None:
    emitter.run(emitter.program.ops[action.op], again=True)


@emits(StartBackward)
def _emit_start_backward(emitter: Emitter, action: StartBackward) -> None:
    emitter.start_backward()


def _sources(joint: JointGraph, program: Program) -> list[fx.Node]:
    nodes = joint.nodes
    names, expected = [node.name for node in nodes], [op.name for op in program.ops]
    if names != expected:
        where = next((i for i, (a, b) in enumerate(zip(names, expected, strict=False)) if a != b), len(expected))
        raise PlanMismatch(
            f"program {program.name} has {len(expected)} ops, the graph {len(names)} nodes; they part at number {where}"
        )
    return nodes


def _getitems(program: Program, sources: Sequence[fx.Node]) -> dict[int, list[int]]:
    """For each op that returns several values and is scheduled: the getitems that take them apart (nested included)."""
    groups: dict[int, list[int]] = defaultdict(list)
    taken: set[int] = set()
    for op in program.ops:
        if sources[op.index].target is not operator.getitem or not program.is_folded(op):
            continue
        parent = program.ops[op.args[0]]
        if parent.index in taken or not (program.is_folded(parent) or parent.is_input):
            groups[parent.index].append(op.index)
            taken.add(op.index)
    return groups


def _drop_unread(graph: fx.Graph) -> None:
    """Erase views, getitems and sizes without readers. Scheduled ops stay: the schedule is the planner's decision."""
    for node in reversed(graph.nodes):
        val = node.meta.get("val")
        is_free = node.target is operator.getitem or not isinstance(val, torch.Tensor) or _is_view(node)
        if not node.users and node.op == "call_function" and is_free and not node.is_impure():
            graph.erase_node(node)


def _is_view(node: fx.Node) -> bool:
    values = (n.meta.get("val") for n in node.all_input_nodes)
    storages = {compat.storage_key(val) for val in values if isinstance(val, torch.Tensor)}
    return compat.storage_key(node.meta["val"]) in storages
