"""One graph that Dynamo captured, and the ways in which it is run: one for each plan made of it."""

from __future__ import annotations

import itertools
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.capture.draws import drawing_devices, takes_generator
from fxmem.capture.effects import is_collective, is_pure
from fxmem.capture.joint import target_name
from fxmem.errors import PlanMismatch
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.passes import rewrite
from fxmem.passes.offload import Transfers, open_transfers
from fxmem.passes.zero_tangents import tangent_outputs, without_tangents
from fxmem.planners.plan import Plan
from fxmem.schedule import Compute, Recompute, StartBackward
from fxmem.step.candidates import LEAST_BYTES, split_graph
from fxmem.step.forms import Form, Forms
from fxmem.step.lower import backend, split
from fxmem.step.measurement import paused

_numbers = itertools.count()


@dataclass
class Variant:
    """A plan of a graph and the code that runs it; `plan` is None for a graph without a backward.

    `rereads`: see `Graph.rereads`. `undefined`: outputs whose gradient its backward does without.
    """

    plan: Plan | None
    code: Callable[..., Any]
    transfers: Transfers | None = None
    rereads: frozenset[int] = frozenset()
    undefined: frozenset[int] = frozenset()

    @cached_property
    def transfers_nothing(self) -> bool:
        """Does all that it saves stay on the device?"""
        stays = (Compute, Recompute, StartBackward)
        return self.plan is not None and all(isinstance(action, stays) for action in self.plan.actions)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that wait between forward and backward, without what is resident anyway."""
        if self.plan is None:
            return 0
        nbytes = self.plan.program.nbytes()
        return sum(nbytes[s] for s in self.saved)

    @cached_property
    def saved(self) -> frozenset[int]:
        """The storages that wait between forward and backward, of a graph that has one."""
        assert self.plan is not None
        boundary = self.plan.actions.index(StartBackward())
        return frozenset(s for s, first, last in self.plan.simulation.lifetimes if first < boundary <= last)


Choose = Callable[["Graph"], Plan]
"""A plan for the graph as it was captured last."""


class Graph:
    """`program`: with costs, sizes as symbols where Dynamo made them so. `break_reason`: why more graphs follow.
    `resumed_at`: the line of a break that this one follows. `is_inner`: code calls it that is in no graph.
    """

    def __init__(self, module: fx.GraphModule, settings: Settings) -> None:
        self.number = next(_numbers)
        self.module, self.settings = module, settings
        self.fake_inputs = compat.fake_inputs(module)  # not Dynamo's examples: those may be the user's own tensors
        self.break_reason = compat.graph_break(module)
        self.resumed_at = compat.resumed_at(module)
        self.is_inner = self.resumed_at is None and compat.is_inner_frame()
        self._forms: Forms | None = None
        self._captured: JointGraph | None = None
        self.autocast = compat.autocast_now()
        self.pinned: frozenset[int] = frozenset()
        self.undefined: frozenset[int] = frozenset()
        self.asked: frozenset[int] = frozenset()  # of those, what a gradient came for
        self._trace = compat.AotTrace()
        self.variants: list[Variant] = []
        self._transfers: Transfers | None = None

    @property
    def may_be_followed(self) -> bool:
        """Is it known of the graph alone that it need not be all of a step?"""
        return self.break_reason is not None or self.is_inner

    @property
    def forms(self) -> Forms:
        """Of a graph that has a backward."""
        assert self._forms is not None
        return self._forms

    @property
    def captured(self) -> Form:
        """As it was captured, of a graph that has a backward."""
        return self.forms.unsplit

    @property
    def has_backward(self) -> bool:
        return self._forms is not None

    def compile(self, choose: Choose, example_inputs: Sequence[Any] | None = None) -> Variant:
        """AOTAutograd, plan, rewrite, lower. Raises BudgetInfeasible, CaptureError, PlanMismatch.

        `example_inputs`: Dynamo's, at the first time; later what AOTAutograd traced then is partitioned anew.
        """
        chosen: list[Plan] = []

        def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            if self._captured is None:
                self._captured = joint
            self._see(without_tangents(joint, self.undefined) or joint)
            plan = choose(self)
            joint = split_graph(self.captured.joint, plan.program.fissions)
            plan = replace(plan, joint=joint, program=named_as(plan.program, joint))
            chosen.append(plan)
            return self._lowered(joint, plan)

        key = uuid.uuid4().hex  # plans depend on measured times, so compiled code is never looked up by settings alone
        compile_ = backend(partition, self.settings.inner, key, trace=self._trace)
        with paused():
            if example_inputs is not None:
                code = compile_(self.module, example_inputs)
            else:
                with compat.retracing(self.fake_inputs):
                    code = compile_(self.module, self.fake_inputs)
        rereads = self.rereads(chosen[-1]) if chosen else frozenset()
        variant = Variant(chosen[-1] if chosen else None, code, self._transfers, rereads, self.undefined)
        self.variants.append(variant)
        return variant

    def forget(self, variant: Variant) -> None:
        """No step of a known kind runs `variant` any more: steps in flight end with it, and its memory goes back."""
        self.variants = [v for v in self.variants if v.code is not variant.code]
        if variant.transfers is not None:
            variant.transfers.retire()

    def pin(self, positions: Iterable[int]) -> None:
        """Nothing is to be computed again from these inputs: the caller overwrites them before backward."""
        program = self.captured.program
        self.pinned |= frozenset(positions)
        self.forms.pin({s for op, i in self.inputs if i in self.pinned for s in program.ops[op].storages})

    def may_run(self, variant: Variant) -> bool:
        """Is it right for what is known of the caller: inputs that it overwrites, gradients that don't come?"""
        return not variant.rereads & self.pinned and variant.undefined == self.undefined

    def expect(self, undefined: Set[int]) -> bool:
        """No gradient of these outputs comes: variants made from now on do without; False if nothing changes."""
        wanted = frozenset(undefined) - self.asked
        if self._captured is None or wanted == self.undefined:
            return False
        joint = without_tangents(self._captured, wanted)
        if joint is None:
            return False
        self.undefined = wanted
        for name in ("inputs", "outputs", "gradients"):
            self.__dict__.pop(name, None)
        self._forms = None
        with paused():
            self._see(joint)
        self.pin(self.pinned)
        return True

    @cached_property
    def beside_the_loss(self) -> frozenset[int]:
        """Outputs that come back beside numbers, and are large: the gradients of which may never come."""
        assert self._captured is not None
        values = {i: node.meta["val"] for i, node in tangent_outputs(self._captured).items()}
        large = frozenset(i for i, value in values.items() if value.dim())
        nbytes = sum(compat.hint(compat.storage_nbytes(values[i])) for i in large)
        return large if len(large) < len(values) and nbytes >= LEAST_BYTES else frozenset()

    def rereads(self, plan: Plan) -> frozenset[int]:
        """Positions of inputs that backward reads under `plan`, and would not read with everything saved."""
        again = _read_in_backward(plan) - {
            s for op in plan.program.ops if op.region == "backward" for s in plan.program.reads(op)
        }
        return frozenset(i for op, i in self.inputs if again.intersection(plan.program.ops[op].storages))

    def _see(self, joint: JointGraph) -> None:
        if self._forms is not None:
            self._forms.see(joint)
        else:
            is_free = not compat.profiler_is_taken()  # somebody's profiler would end with ours
            self._forms = Forms(joint, self.settings, may_run=is_free)

    def _lowered(self, joint: JointGraph, plan: Plan) -> tuple[fx.GraphModule, fx.GraphModule]:
        transfers = self._transfers = open_transfers(plan.program, plan.actions, self.settings.offload_dir)
        forward, backward = split(rewrite(joint, plan.program, plan.actions, transfers.key))
        owner = backward if self.settings.inner == "eager" else self  # what lives as long as a backward may come
        weakref.finalize(owner, transfers.close)
        return forward, backward

    def with_plan(self, plan: Plan) -> Variant:
        """The code that runs `plan`, compiled unless there is some that runs the same actions."""
        for variant in self.variants:
            known = variant.plan
            if not self.may_run(variant):
                continue
            if known is not None and known.actions == plan.actions and _is_same_code(known.program, plan.program):
                return replace(variant, plan=plan)
        return self.compile(lambda _: plan)

    def gradient_bytes(self, values: Mapping[str, int]) -> tuple[int, int]:
        """Of what its backward is given, and of what it returns, at the sizes `values`."""
        program = self.captured.program.at(values)
        nbytes = program.nbytes()
        returned = {s for i in program.backward_outputs for s in program.ops[i].storages}
        return sum(nbytes[s] for s in program.tangents), sum(nbytes[s] for s in returned)

    def values(self, args: Sequence[Any]) -> dict[str, int]:
        """What a call's arguments give to the size symbols."""
        if not self.has_backward or not self.captured.program.is_symbolic:
            return {}
        return compat.symbol_values(self.fake_inputs, args)

    @cached_property
    def may_run_twice(self) -> bool:
        """Does its forward, given the same states of the default generators, do nothing but make the same values?"""
        joint = self.captured.joint
        nodes = joint.nodes[: joint.num_forward_nodes]
        return not joint.mutated_inputs and all(
            is_pure(node) and not is_collective(node) and not takes_generator(node) for node in nodes
        )

    @cached_property
    def drawing_devices(self) -> frozenset[torch.device]:
        """Devices from whose generators the graph draws."""
        return drawing_devices(self.captured.joint.nodes)

    def input_name(self, position: int) -> str:
        """Where input number `position` comes from, for an error's text."""
        node = self.module.graph.find_nodes(op="placeholder")[position]
        return compat.placeholder_source(node) or str(node.name)

    @cached_property
    def inputs(self) -> list[tuple[int, int]]:
        """See `inputs_of`."""
        return inputs_of(self.captured.joint)

    @cached_property
    def outputs(self) -> dict[int, int]:
        """See `outputs_of`."""
        return outputs_of(self.captured.joint)

    @cached_property
    def gradients(self) -> dict[int, int]:
        """See `gradients_of`."""
        return gradients_of(self.captured.joint, self.captured.program)


def code_beside(graphs: Iterable[Graph]) -> list[str]:
    """What runs before and between `graphs` where torch broke them, for an error's text."""
    known = list(graphs)
    reasons = list(dict.fromkeys(graph.break_reason for graph in known if graph.break_reason is not None))
    if reasons:
        return [f"what runs between its graphs, after {'; '.join(reasons[:3])}"]
    lines = [graph.resumed_at for graph in known if graph.resumed_at is not None]
    return [f"what runs before {lines[0]}, where torch breaks the graph"] if lines else []


def _is_same_code(one: Program, other: Program) -> bool:
    return (one.released, one.fissions) == (other.released, other.fissions)


def _read_in_backward(plan: Plan) -> set[int]:
    """Storages that the backward of `plan` reads, views left out."""
    program, boundary = plan.program, plan.actions.index(StartBackward())
    ops = [program.ops[a.op] for a in plan.actions[boundary:] if isinstance(a, (Compute, Recompute))]
    return {s for op in ops if not program.is_folded(op) for s in program.reads(op)}


def inputs_of(joint: JointGraph) -> list[tuple[int, int]]:
    """(op, position among a call's arguments) of every forward input."""
    nodes = joint.nodes[: joint.num_forward_nodes]
    placed = [(i, node.meta.get("desc")) for i, node in enumerate(nodes) if node.op == "placeholder"]
    return [
        (op, desc.idx if isinstance(desc, compat.PlainAOTInput) else position)
        for position, (op, desc) in enumerate(placed)
    ]


def outputs_of(joint: JointGraph) -> dict[int, int]:
    """Position among what a call returns -> number of the program's forward output, of those that the graph makes."""
    index = _numbered(joint.outputs[: joint.num_forward_outputs])
    descs = joint.graph_module.graph.output_node().meta.get("desc") or ()
    pairs = zip(joint.outputs[: joint.num_forward_outputs], descs, strict=False)
    return {d.idx: index[r] for r, d in pairs if isinstance(r, fx.Node) and isinstance(d, compat.PlainAOTOutput)}


def _numbered(results: Sequence[Any]) -> dict[fx.Node, int]:
    """Node -> its number among a program's forward or backward outputs."""
    return {node: i for i, node in enumerate(dict.fromkeys(r for r in results if isinstance(r, fx.Node)))}


def gradients_of(joint: JointGraph, program: Program) -> dict[int, int]:
    """Number of the program's backward output -> storage of the input that it is the gradient of."""
    index = _numbered(joint.outputs[joint.num_forward_outputs :])
    pairs = zip(inputs_of(joint), joint.outputs[joint.num_forward_outputs :], strict=False)
    known = ((program.ops[i].storages, g) for (i, _), g in pairs)
    return {index[g]: storages[0] for storages, g in known if isinstance(g, fx.Node) and storages}


def named_as(program: Program, joint: JointGraph) -> Program:
    """`program` with the names that the same graph has now: captured again, its nodes may be numbered otherwise.

    Raises PlanMismatch for another graph.
    """
    nodes = joint.nodes
    if [op.name for op in program.ops] == [node.name for node in nodes]:
        return program
    same = [op.target for op in program.ops if not op.is_input] == [
        target_name(node) for node in nodes if node.op == "call_function"
    ]
    if not same:
        raise PlanMismatch("the graph was captured again, and other ops came out than those that were planned")
    ops = tuple(replace(op, name=node.name) for op, node in zip(program.ops, nodes, strict=True))
    return replace(program, ops=ops)


def storages_of(args: Sequence[Any], device: torch.device) -> list[tuple[int, int]]:
    """(address, bytes) of the storage of each argument; (0, 0) for what is no tensor on `device`."""
    return [_storage_of(x, device) for x in args]


def _storage_of(value: Any, device: torch.device) -> tuple[int, int]:
    if not isinstance(value, Tensor) or value.device != device or value.layout != torch.strided:
        return 0, 0
    if isinstance(value, compat.FakeTensor) or compat.is_wrapper_subclass(value):
        return 0, 0
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
