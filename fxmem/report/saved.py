"""The saved-tensor table by module: blocks, and parts of a split region, that are decided alike stand once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from fxmem.ir.program import Program
from fxmem.planners.plan import Plan
from fxmem.report.decisions import Decision, Saved, saved_tensors
from fxmem.report.regions import num_parts

_BLOCK = re.compile(r"^(?P<before>.*?)(?P<number>\d+)(?=\.|$)")
Shape = tuple[tuple[str, str, int, Decision, str], ...]


@dataclass(frozen=True)
class Row:
    """One value of a block, `module` relative to it; `nbytes`, `seconds` of one block."""

    module: str
    value: str
    target: str
    nbytes: int
    decision: Decision
    seconds: float
    reason: str
    source: str


@dataclass(frozen=True)
class Group:
    """Blocks decided alike: `name` with the numbers of all of them, `count` of them, `rows` of the first."""

    name: str
    count: int
    rows: tuple[Row, ...]

    def bytes_of(self, decision: Decision) -> int:
        """Of all its blocks together."""
        return self.count * sum(row.nbytes for row in self.rows if row.decision == decision)

    @property
    def nbytes(self) -> int:
        return self.count * sum(row.nbytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """What the plan adds for them: of all its blocks together."""
        return self.count * sum(row.seconds for row in self.rows if row.decision != "keep")


def by_module(plan: Plan) -> list[Group]:
    """Every value that backward needs, by block of the model (a numbered module, or a module's path), largest first."""
    blocks: dict[str, list[Saved]] = {}
    for saved in _parts_together(plan.program, saved_tensors(plan)):
        blocks.setdefault(_block_of(saved.module), []).append(saved)
    alike: dict[tuple[str, Shape], list[str]] = {}
    for block, rows in blocks.items():
        rows.sort(key=lambda row: row.op)
        alike.setdefault((_BLOCK.sub(r"\g<before>*", block), _shape(block, rows)), []).append(block)
    groups = [_group(names, blocks[names[0]]) for names in alike.values()]
    return sorted(groups, key=lambda group: (-group.nbytes, group.name))


def _parts_together(program: Program, rows: Iterable[Saved]) -> list[Saved]:
    """`rows` with the parts of one value that are decided alike as one row, of all their bytes and seconds."""
    found: dict[Hashable, list[Saved]] = {}
    for row in rows:
        part = program.ops[row.op].part
        key = row.storage if part is None else (part.op, part.region, row.target, row.decision, row.stays)
        found.setdefault(key, []).append(row)
    return [_together(program, alike) for alike in found.values()]


def _together(program: Program, rows: Sequence[Saved]) -> Saved:
    part = program.ops[rows[0].op].part
    if part is None:
        return rows[0]
    total = num_parts(program, part)
    name = f"{part.op}, {len(rows)} of {total} parts" if len(rows) < total else f"{part.op}, its {total} parts"
    nbytes, seconds, again = (sum(getattr(row, name) for row in rows) for name in ("nbytes", "seconds", "recompute_s"))
    return replace(rows[0], name=name, nbytes=nbytes, seconds=seconds, recompute_s=again)


def _block_of(module: str) -> str:
    """Up to the first number; a module without one by itself."""
    found = _BLOCK.match(module)
    return found[0] if found else module


def _shape(block: str, rows: Sequence[Saved]) -> Shape:
    return tuple((_within(block, row.module), row.target, row.nbytes, row.decision, row.stays) for row in rows)


def _within(block: str, module: str) -> str:
    return module[len(block) :].lstrip(".")


def _group(names: Sequence[str], rows: Sequence[Saved]) -> Group:
    found = [
        Row(
            _within(names[0], row.module), row.name, row.target, row.nbytes, row.decision, row.seconds,
            f"{row.reason}; not offloaded: {row.stays}" if row.stays else row.reason, row.source,
        )
        for row in rows
    ]  # fmt: skip
    return Group(_named(names), len(names), tuple(found))


def _named(names: Sequence[str]) -> str:
    first = _BLOCK.match(names[0])
    if first is None or len(names) == 1:
        return names[0]
    numbers = sorted(int(found["number"]) for name in names if (found := _BLOCK.match(name)))
    return f"{first['before']}{{{', '.join(ranges(numbers))}}}"


def ranges(numbers: Iterable[int]) -> list[str]:
    """[0, 1, 2, 5] -> ["0-2", "5"]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
