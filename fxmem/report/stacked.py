"""Bytes on the device at every action of a schedule, told apart by what they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from fxmem.ir.program import Program
from fxmem.planners.plan import Plan, baseline_actions
from fxmem.planners.problem import reduce_program
from fxmem.schedule import (
    Action,
    Compute,
    Free,
    Machine,
    Offload,
    Recompute,
    Reload,
    SimResult,
    StartBackward,
    Wait,
    simulate,
)

Kind = Literal[
    "parameters",
    "beside the graph",
    "inputs",
    "gradients",
    "outputs",
    "saved",
    "recomputed",
    "in transfer",
    "parts of a split region",
    "temporary",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""From the bottom of a stack to its top. "beside the graph": optimizer state, gradients from before, and the like;
"temporary": what forward or backward makes and does not keep for the other, workspaces included; "parts of a split
region": what of that is made for one part of a region."""


@dataclass(frozen=True)
class Run:
    """A schedule with what the simulator says of it. `bytes_of[kind][i]`: device bytes of that kind while action i
    runs; over all kinds they add up to `result.bytes_at`."""

    program: Program
    actions: tuple[Action, ...]
    result: SimResult
    bytes_of: dict[Kind, npt.NDArray[np.int64]]


def run_of(program: Program, actions: tuple[Action, ...], machine: Machine) -> Run:
    """`actions` of `program`, simulated and told apart."""
    result = simulate(program, actions, machine)
    return Run(program, actions, result, _bytes_of(program, actions, result))


def before_and_after(plan: Plan) -> tuple[Run, Run]:
    """The step as it was captured, unsplit and with everything saved, and the step as planned."""
    reference = plan.program.reference
    plain = baseline_actions(reduce_program(reference))
    return run_of(reference, plain, plan.machine), run_of(plan.program, plan.actions, plan.machine)


def _bytes_of(program: Program, actions: Sequence[Action], result: SimResult) -> dict[Kind, npt.NDArray[np.int64]]:
    nbytes = program.nbytes()
    change = {kind: np.zeros(len(actions) + 2, dtype=np.int64) for kind in KINDS}
    for kind, storage, first, last in _residencies(program, actions, result):
        change[kind][first] += nbytes[storage]
        change[kind][last + 1] -= nbytes[storage]
    bytes_of = {kind: np.cumsum(delta)[: len(actions)] for kind, delta in change.items()}
    static = {s for i in program.static for s in program.ops[i].storages}
    for storage in program.resident:
        bytes_of["parameters" if storage in static else "inputs"] += nbytes[storage]
    bytes_of["beside the graph"] += program.extra_resident_bytes
    for step, action in enumerate(actions):
        if isinstance(action, (Compute, Recompute)):
            bytes_of["temporary"][step] += program.ops[action.op].workspace_bytes
    return bytes_of


def _residencies(
    program: Program, actions: Sequence[Action], result: SimResult
) -> Iterator[tuple[Kind, int, int, int]]:
    """(kind, storage, first step, last step), the steps while a copy is under way apart."""
    boundary = next((i for i, action in enumerate(actions) if isinstance(action, StartBackward)), len(actions))
    gradients = {s for index in program.backward_outputs for s in program.ops[index].storages}
    outputs = {s for index in program.forward_outputs for s in program.ops[index].storages}
    copies = _copies(actions)
    in_parts = {s for op in program.ops if op.part for s in program.allocates(op)}
    for storage, first, last in result.lifetimes:
        kind: Kind = "parts of a split region" if storage in in_parts else "temporary"
        if storage in gradients:
            kind = "gradients"
        elif storage in outputs:
            kind = "outputs"
        elif isinstance(actions[first], Recompute):
            kind = "recomputed"
        elif first < boundary < last or isinstance(actions[first], Reload):
            kind = "saved"
        at = first
        for begin, end in copies.get(storage, ()):
            if first <= begin <= end <= last:
                yield kind, storage, at, begin - 1
                yield "in transfer", storage, begin, end
                at = end + 1
        yield kind, storage, at, last


def _copies(actions: Sequence[Action]) -> dict[int, list[tuple[int, int]]]:
    """storage -> (first, last) step of each copy: from Offload until Free, from Reload until Wait."""
    begun: dict[int, int] = {}
    found: dict[int, list[tuple[int, int]]] = {}
    for step, action in enumerate(actions):
        if isinstance(action, (Offload, Reload)):
            begun[action.storage] = step
        elif isinstance(action, (Free, Wait)) and action.storage in begun:
            last = step - 1 if isinstance(action, Free) else step
            found.setdefault(action.storage, []).append((begun.pop(action.storage), last))
    return found
