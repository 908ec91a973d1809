"""The regions of a plan that run part by part, as a reader knows them, and what splitting bought."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass

from fxmem.ir.program import Fission, Op, Part, Program
from fxmem.planners.plan import Plan
from fxmem.report.frontier import planned_as
from fxmem.report.names import line_of, split_source
from fxmem.units import format_bytes

_CALL = re.compile(r"(?:\w+\.)*([A-Za-z_]\w*)\s*\(")
_MOST = 0.5
"""Of a step's ops: a region of more than that is called the step."""


@dataclass(frozen=True)
class SplitRegion:
    """One region. `name`: what the lines of the model call that its largest values come from. `module`, `line`,
    `whole_bytes` of the largest value, of which no more than `part_bytes` exist at once; `num_ops`: captured ops that
    run in parts."""

    fission: Fission
    name: str
    module: str = ""
    line: str = ""
    num_ops: int = 0
    whole_bytes: int = 0
    part_bytes: int = 0

    @property
    def rows(self) -> int:
        """Of the largest part, along the dimension that is split."""
        return max(last - first for first, last in itertools.pairwise(self.fission.offsets))

    @property
    def sentence(self) -> str:
        """In words."""
        value = f"; {format_bytes(self.part_bytes)} of its {format_bytes(self.whole_bytes)} at once"
        when = "; its gradients are made in forward" * self.fission.fuse
        place = ", ".join(filter(None, (self.module, self.line)))
        return (
            f"{self.name}: {self.fission.num_parts} parts of up to {self.rows} along dimension {self.fission.dim}"
            f"{value * bool(self.part_bytes)}{when}{f' ({place})' * bool(place)}"
        )


@dataclass(frozen=True)
class Bought:
    """What splitting bought. `min_bytes`, `unsplit_min_bytes`: smallest budgets found; `split_s`: the plan's extra
    seconds, of `baseline_s`; `unsplit_s`: those under the same peak without splitting, None where that does not fit."""

    min_bytes: int
    unsplit_min_bytes: int
    unsplit_s: float | None
    split_s: float
    baseline_s: float

    @property
    def sentence(self) -> str:
        """In words."""
        split_min, unsplit_min = map(format_bytes, (self.min_bytes, self.unsplit_min_bytes))
        floors = f"Split like that, the smallest budget found is {split_min}; unsplit it is {unsplit_min}."
        if self.unsplit_s is None:
            return f"{floors} Unsplit, the step does not fit under the peak of this plan."
        unsplit, split = (seconds / (self.baseline_s or 1.0) for seconds in (self.unsplit_s, self.split_s))
        return f"{floors} Under the peak of this plan the step takes {split:.2%} more time, unsplit {unsplit:.2%}."


def regions_of(program: Program) -> list[SplitRegion]:
    """Every region of a split program, in the order of `program.fissions`."""
    parts: dict[int, list[Op]] = defaultdict(list)
    for op in program.ops:
        if op.part is not None:
            parts[op.part.region].append(op)
    return [_region(program, fission, parts[number]) for number, fission in enumerate(program.fissions)]


def part_shown(program: Program, op: Op) -> str:
    """An op for people, one of a part as that: what it is called, which part of how many."""
    if op.part is None:
        return op.shown
    return f"{op.part.op}, part {op.part.number + 1} of {num_parts(program, op.part)}"


def num_parts(program: Program, part: Part) -> int:
    """In how many the region of `part` runs."""
    return program.fissions[part.region].num_parts


def bought(plan: Plan) -> Bought:
    """What the plan's splits are worth, found with little effort; they have to be some, and nothing offloaded."""
    unsplit = plan.program.reference
    least, whole = planned_as(plan, plan.program, "min"), planned_as(plan, unsplit, "min")
    fitting = planned_as(plan, unsplit, plan.peak_bytes)
    return Bought(
        min(plan.peak_bytes, least.peak_bytes if least else plan.peak_bytes),
        whole.peak_bytes if whole else plan.baseline_peak_bytes,
        fitting.extra_s if fitting else None,
        plan.extra_s,
        plan.baseline_s,
    )


def _region(program: Program, fission: Fission, ops: list[Op]) -> SplitRegion:
    values = _values(program, fission, ops)
    if not values:
        return SplitRegion(fission, "a region")
    largest = max(values, key=lambda op: sum(values[op]))
    shown = {_captured(op): op for op in reversed(ops)}
    sizes = sum(values[largest])
    calls = [_called(shown[name]) for name, made in values.items() if 2 * sum(made) >= sizes]
    total = len((program.unsplit or program).ops)
    return SplitRegion(
        fission,
        "the step" if len(shown) > _MOST * total else " to ".join(dict.fromkeys((calls[0], calls[-1]))),
        shown[largest].module,
        line_of(shown[largest].source),
        len(shown),
        sizes,
        max(values[largest]),
    )


def _values(program: Program, fission: Fission, ops: list[Op]) -> dict[str, list[int]]:
    """Captured op of forward -> bytes of each part of what it makes; of both regions if forward makes the gradients."""
    nbytes = program.nbytes()
    values: dict[str, list[int]] = defaultdict(list)
    for op in ops:
        made = sum(nbytes[s] for s in program.allocates(op))
        if made and (op.region == "forward" or fission.fuse):
            values[_captured(op)].append(made)
    return values


def _captured(op: Op) -> str:
    return op.part.op if op.part else op.name


def _called(op: Op) -> str:
    """The function that the model's line calls, or else the op's own name."""
    found = _CALL.search(split_source(op.source)[2])
    return found[1] if found else _captured(op)
