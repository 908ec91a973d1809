"""What a plan decided for every value that backward needs, and what stands at the peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fxmem.planners.plan import STAYS, Plan
from fxmem.schedule import Offload, Recompute, StartBackward

Decision = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True)
class Saved:
    """One storage that forward makes and backward reads. `stays`: why it could not be offloaded, "" if it could."""

    storage: int
    name: str
    target: str
    nbytes: int
    decision: Decision
    recompute_s: float
    source: str
    stays: str = ""


@dataclass(frozen=True)
class Standing:
    """One storage on the device at the peak; `kind`: resident, saved or temporary."""

    name: str
    nbytes: int
    kind: Literal["resident", "saved", "temporary", "workspace"]
    source: str


def saved_tensors(plan: Plan) -> list[Saved]:
    """The candidates for saving with the decision for each, largest first."""
    program = plan.program
    nbytes = program.nbytes()
    boundary = plan.actions.index(StartBackward())
    kept = {s for s, first, last in plan.simulation.lifetimes if first < boundary <= last}
    offloaded = {action.storage for action in plan.actions if isinstance(action, Offload)}
    again: dict[int, float] = {}
    for action in plan.actions:
        if isinstance(action, Recompute):
            again[action.op] = again.get(action.op, 0.0) + program.ops[action.op].seconds
    resident = set(program.resident)
    reasons = plan.notes.get(STAYS, {})
    needed = {s for op in program.ops if op.region == "backward" for s in program.reads(op)} - resident
    rows = []
    for storage in needed:
        op = program.ops[program.producer[storage]]
        if op.region == "backward":
            continue
        decision: Decision = "offload" if storage in offloaded else "keep" if storage in kept else "recompute"
        cost_s = again.get(op.index, 0.0)
        stays = "" if decision == "offload" else reasons.get(str(storage), "")
        rows.append(Saved(storage, op.shown, op.target, nbytes[storage], decision, cost_s, op.source, stays))
    return sorted(rows, key=lambda row: (-row.nbytes, row.storage))


def standing_at_peak(plan: Plan) -> list[Standing]:
    """Everything on the device at the peak, largest first; the bytes sum to the peak."""
    program = plan.program
    nbytes = program.nbytes()
    step = plan.simulation.peak_step
    boundary = plan.actions.index(StartBackward())
    rows = [Standing("beside the graph", program.extra_resident_bytes, "resident", "")]
    rows += [_standing(plan, s, nbytes[s], "resident") for s in program.resident]
    for storage, first, last in plan.simulation.lifetimes:
        if first <= step <= last:
            kind: Literal["saved", "temporary"] = "saved" if first < boundary < step else "temporary"
            rows.append(_standing(plan, storage, nbytes[storage], kind))
    workspace = plan.peak_bytes - sum(row.nbytes for row in rows)
    rows.append(Standing(f"workspace of {plan.actions[step]}", workspace, "workspace", ""))
    return sorted((row for row in rows if row.nbytes), key=lambda row: -row.nbytes)


def _standing(plan: Plan, storage: int, nbytes: int, kind: Literal["resident", "saved", "temporary"]) -> Standing:
    op = plan.program.ops[plan.program.producer[storage]]
    return Standing(op.shown, nbytes, kind, op.source)
