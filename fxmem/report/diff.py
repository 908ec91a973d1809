"""Two plans compared in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fxmem.planners.plan import Plan
from fxmem.report.decisions import Saved, saved_tensors
from fxmem.report.names import line_of
from fxmem.report.regions import regions_of
from fxmem.units import format_bytes

NUM_ROWS = 20
_DONE = {"keep": "kept", "recompute": "recomputed", "offload": "offloaded"}


def difference(one: Plan, other: Plan) -> str:
    """What `other` is and does otherwise than `one`; values by size, `NUM_ROWS` of them."""
    lines = [*_figures(one, other)]
    if one.program.reference.fingerprint != other.program.reference.fingerprint:
        lines.append(f"they are plans of different graphs: {one.program.shown}; {other.program.shown}")
    elif one.program.fissions != other.program.fissions:
        lines.append(f"runs in parts: {_split(one)} -> {_split(other)}")
    else:
        lines += _decisions(one, other)
        if not lines and one.actions != other.actions:
            lines.append("the same decisions in another order")
    return "\n".join(lines) or "the plans are the same"


def _figures(one: Plan, other: Plan) -> Iterator[str]:
    rows: list[tuple[str, Callable[[Plan], str]]] = [
        ("planner", lambda plan: plan.planner),
        ("budget", lambda plan: "none" if plan.budget_bytes is None else _exact(plan.budget_bytes)),
        ("predicted peak", lambda plan: _exact(plan.peak_bytes)),
        ("peak with no plan", lambda plan: _exact(plan.baseline_peak_bytes)),
        ("extra time", lambda plan: f"{plan.extra_s * 1e3:.3f} ms"),
    ]
    for name, show in rows:
        if show(one) != show(other):
            yield f"{name}: {show(one)} -> {show(other)}"


def _split(plan: Plan) -> str:
    return ", ".join(f"{r.name} in {r.fission.num_parts} parts" for r in regions_of(plan.program)) or "nothing"


def _exact(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes} bytes)"


def _decisions(one: Plan, other: Plan) -> list[str]:
    before = {row.storage: row for row in saved_tensors(one)}
    pairs = [(before[row.storage], row) for row in saved_tensors(other) if row.storage in before]
    changed = [(old, new) for old, new in pairs if old.decision != new.decision]
    lines = [_sentence(old, new) for old, new in changed[:NUM_ROWS]]
    rest = sum(new.nbytes for _, new in changed[NUM_ROWS:])
    return lines + ([f"and {len(changed) - NUM_ROWS} more, {format_bytes(rest)} together"] if rest else [])


def _sentence(old: Saved, new: Saved) -> str:
    place = ", ".join(filter(None, (new.module, line_of(new.source))))
    source = f" ({place})" if place else ""
    return f"{new.name}, {format_bytes(new.nbytes)}: {_DONE[old.decision]} -> {_DONE[new.decision]}{source}"
