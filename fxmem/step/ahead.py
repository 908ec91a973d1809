"""Plans ahead of time: of the one graph that a model is, or of all graphs that Dynamo breaks it into, as one step.

Between several graphs nothing runs here, so what code there holds is not counted (a compiled step measures it), and a
later graph's arguments are told by what they look like: a parameter by its name, another value by its shape and dtype,
first among what earlier graphs return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor, fx

from fxmem.budget import Budget
from fxmem.capture import JointGraph
from fxmem.errors import PlanMismatch
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.planners.plan import Plan
from fxmem.step.forms import plan_graph
from fxmem.step.graph import gradients_of, inputs_of, outputs_of
from fxmem.step.graph_plan import annotated_program, plan_joined
from fxmem.step.joined import Beside, Made, Part, join, with_numbers

Look = tuple[Any, ...]
"""Shape and dtype of a value."""


def plan_captured(
    joints: Sequence[JointGraph],
    settings: Settings,
    budget: Budget,
    resident_bytes: Callable[[Program], int],
    may_run: bool,
) -> Plan:
    """Plan a captured step. Raises BudgetInfeasible, and PlanMismatch for a loaded plan where there are several graphs.

    `resident_bytes(program)`: bytes beside it. `may_run`: single ops may be measured.
    """
    if len(joints) == 1:
        return plan_graph(joints[0], settings, budget, resident_bytes, may_run=may_run)
    if settings.plan is not None:
        raise PlanMismatch(f"the plan is of one graph; the model breaks into {len(joints)}")
    parts = _parts(joints, [with_numbers(annotated_program(joint, settings, may_run), {}) for joint in joints])
    bare = join(parts, range(len(parts))[::-1])
    joined = join(parts, range(len(parts))[::-1], Beside(throughout=resident_bytes(bare.program)))
    return plan_joined(joined, joints, settings, budget)


def _parts(joints: Sequence[JointGraph], programs: Sequence[Program]) -> list[Part]:
    made: dict[Look, Made] = {}
    parts = []
    for call, (joint, program) in enumerate(zip(joints, programs, strict=True)):
        parts.append(Part(program, _origins(joint, program, made), gradients_of(joint, program)))
        for number in outputs_of(joint).values():
            op = program.forward_outputs[number]
            look = _look(joint.nodes[op])
            if look is not None and program.ops[op].storages:
                made.setdefault(look, Made(call, number))
    return parts


def _origins(joint: JointGraph, program: Program, made: dict[Look, Made]) -> dict[int, Made | Hashable]:
    origins: dict[int, Made | Hashable] = {}
    num_seen: Counter[Look] = Counter()
    for op, _ in inputs_of(joint):
        node = joint.nodes[op]
        look = _look(node)
        origin: Made | Hashable = ("model", joint.names[node.name]) if node.name in joint.names else None
        if origin is None and look is not None:
            origin = made.get(look) or ("argument", look, num_seen[look])
            num_seen[look] += 1
        origins.update((s, origin) for s in program.ops[op].storages if s not in origins)
    constants = [op for op in program.ops if op.is_input and op.region == "forward"]
    origins.update((s, ("own", joint.fingerprint, s)) for op in constants for s in op.storages if s not in origins)
    return origins


def _look(node: fx.Node) -> Look | None:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
