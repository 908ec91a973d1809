"""What holds the smallest budget where it is, and what would lower it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fxmem.ir.program import Program
from fxmem.planners.plan import Plan
from fxmem.report.frontier import smallest
from fxmem.report.names import line_of
from fxmem.report.regions import part_shown
from fxmem.report.stacked import KINDS, run_of
from fxmem.schedule import Compute, Recompute
from fxmem.schedule.simulate import resident_bytes
from fxmem.units import format_bytes

_SMALL_BYTES = 64 << 10
_NUM_OUTPUTS = 3


@dataclass(frozen=True)
class Floor:
    """The smallest budget found for a graph: `peak_bytes`, the op that runs there, `parts` (kind, bytes) adding up to
    it, and `ways` lower, each a sentence."""

    peak_bytes: int
    op: str
    module: str
    line: str
    parts: tuple[tuple[str, int], ...]
    ways: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """What stands there, in words."""
        what = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in self.parts[:5])
        where = (f" of {self.module}" if self.module else "") + f" ({self.line})" * bool(self.line) if self.op else ""
        at = f" while {self.op}{where} runs" if self.op else ""
        return f"The smallest budget found is {format_bytes(self.peak_bytes)}. There stand{at}: {what}."


def floor_of(plan: Plan) -> Floor:
    """Of the plan's graph, on the plan's machine."""
    least = smallest(plan)
    run = run_of(least.program, least.actions, least.machine)
    step = run.result.peak_step
    parts = sorted(((kind, int(run.bytes_of[kind][step])) for kind in KINDS), key=lambda part: -part[1])
    action = least.actions[step]
    op = least.program.ops[action.op] if isinstance(action, (Compute, Recompute)) else None
    return Floor(
        peak_bytes=least.peak_bytes,
        op=part_shown(least.program, op) if op else "",
        module=op.module if op else "",
        line=line_of(op.source) if op else "",
        parts=tuple(part for part in parts if part[1]),
        ways=tuple(_ways(plan, least, dict(parts))),
    )


def _ways(plan: Plan, least: Plan, parts: dict[str, int]) -> Iterator[str]:
    elsewhere = _with_a_tier(plan.program)
    if not plan.machine.links and elsewhere < least.peak_bytes:
        yield (
            'Offloading (tiers="host", or tiers="disk" with offload_dir=) may lower it to '
            f"{format_bytes(elsewhere)} at best: what single ops read and make. "
            'fxmem.plan(..., budget="min", tiers=...) tells how far.'
        )
    yield from _outputs(plan)
    smaller = _half_the_batch(least, parts)
    if smaller:
        yield smaller
    if parts["beside the graph"] > _SMALL_BYTES:
        yield (
            f"{format_bytes(parts['beside the graph'])} stand beside the graph (optimizer state, old gradients): "
            "an optimizer with less state, or optimizer.zero_grad(set_to_none=True) before forward, gives them back."
        )


def _with_a_tier(program: Program) -> int:
    """What stands at the least if all else is elsewhere: for each op, in captured order, what it reads and makes, and
    what was returned by then."""
    nbytes, resident = program.nbytes(), set(program.resident)
    base = resident_bytes(program)
    standing: set[int] = set()
    most = base
    for op in program.ops:
        touched = {*program.reads(op), *op.mutates, *program.allocates(op), *standing} - resident
        if not program.is_folded(op):
            most = max(most, base + sum(nbytes[s] for s in touched) + op.workspace_bytes)
        standing |= program.kept.intersection(op.storages)
    return most


def _outputs(plan: Plan) -> Iterator[str]:
    """Large values that forward returns, and that the caller holds through backward."""
    program, nbytes = plan.program, plan.program.nbytes()
    held = [program.ops[i] for i in program.forward_outputs if i not in program.released]
    if len(held) < 2:  # the loss
        return
    inputs = set(program.resident)
    sizes = [(sum(nbytes[s] for s in op.storages if s not in inputs), op) for op in held]
    large = sorted((pair for pair in sizes if pair[0] > _SMALL_BYTES), key=lambda pair: -pair[0])
    for size, op in large[:_NUM_OUTPUTS]:
        yield (
            f"{op.shown}{f' of {op.module}' * bool(op.module)} ({format_bytes(size)}) is returned by forward and "
            "stands to the end of backward while the caller holds it: return only the loss, or drop it before backward."
        )


def _half_the_batch(least: Plan, parts: dict[str, int]) -> str:
    fixed = parts["parameters"] + parts["gradients"] + parts["beside the graph"]
    halved = _at_half(least)
    if halved is not None:
        return f"At half the sizes of the inputs it is {format_bytes(halved)}."
    rest = least.peak_bytes - fixed
    if rest < _SMALL_BYTES:
        return ""
    return (
        f"{format_bytes(rest)} of it grow with the batch (values of forward and backward, inputs): half the batch "
        f"needs about {format_bytes(rest // 2)} less. {format_bytes(fixed)} do not (parameters, their gradients, what "
        "stands beside the graph)."
    )


def _at_half(least: Plan) -> int | None:
    """The same schedule with every size symbol at half its value, where sizes are symbols."""
    hints = least.program.hints
    if not hints or not least.program.is_symbolic:
        return None
    return least.peak_bytes_at({name: max(1, value // 2) for name, value in hints.items()})
