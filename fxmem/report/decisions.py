"""What a plan decided for every value that backward needs, and what stands at the peak."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fxmem.ir.program import Op, Program
from fxmem.planners.plan import STAYS, Plan
from fxmem.report.regions import part_shown
from fxmem.schedule import Offload, Recompute, Reload, StartBackward
from fxmem.units import format_bytes

Decision = Literal["keep", "recompute", "offload"]


@dataclass(frozen=True)
class Saved:
    """One storage that forward makes and backward reads.

    `op`: index of what makes it. `recompute_s`: seconds of making it again, as often as the plan does. `seconds`: what
    the decision takes: making it again, or copying it both ways; of what is kept, what making it again would take.
    `reason`: in words. `stays`: why it could not be offloaded, "" if it could.
    """

    storage: int
    name: str
    target: str
    nbytes: int
    decision: Decision
    recompute_s: float
    source: str
    stays: str = ""
    op: int = 0
    module: str = ""
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Standing:
    """One storage on the device at the peak; `kind`: resident, saved or temporary."""

    name: str
    nbytes: int
    kind: Literal["resident", "saved", "temporary", "workspace"]
    source: str
    module: str = ""


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
    copies = _copies(plan)
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
        row = Saved(storage, part_shown(program, op), op.target, nbytes[storage], decision, cost_s, op.source, stays)
        seconds, reason = _why(plan, op, row, copies.get(storage))
        rows.append(replace(row, op=op.index, module=op.module, seconds=seconds, reason=reason))
    return sorted(rows, key=lambda row: (-row.nbytes, row.storage))


def _copies(plan: Plan) -> dict[int, tuple[str, float]]:
    """storage -> (tier, seconds of its copies both ways) of what is offloaded."""
    copies: dict[int, tuple[str, float]] = {}
    for span in plan.simulation.spans:
        action = plan.actions[span.step]
        if isinstance(action, (Offload, Reload)):
            tier, before_s = copies.get(action.storage, (span.stream.split("_")[0], 0.0))
            copies[action.storage] = tier, before_s + span.end_s - span.start_s
    return copies


def _why(plan: Plan, op: Op, row: Saved, copied: tuple[str, float] | None) -> tuple[float, str]:
    """(seconds, reason) of the decision of `row`, a value of `op`."""
    if row.decision == "offload" and copied is not None:
        return copied[1], f"copied to the {copied[0]} and back beside the computation"
    if row.decision == "recompute":
        return row.recompute_s, "given up after forward, made again for backward"
    if not op.recomputable:
        return op.seconds, f"kept: {_why_once(plan.program, op)}"
    if plan.budget_bytes is None:
        return op.seconds, "kept: there is no budget"
    per_ms = f"{format_bytes(row.nbytes / (op.seconds * 1e3))} a millisecond" if op.seconds else "for nothing"
    return op.seconds, f"kept: making it again gives {per_ms}"


def _why_once(program: Program, op: Op) -> str:
    if op.is_random:
        return "it is random, and would be drawn anew"
    if op.is_collective:
        return "it is a collective, which every rank runs once"
    if op.mutates:
        return "it writes in place"
    return "it may not run twice (it is to be kept, has effects, or reads what is overwritten later)"


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
    return Standing(part_shown(plan.program, op), nbytes, kind, op.source, op.module)
