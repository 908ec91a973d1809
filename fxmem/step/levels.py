"""Measured bytes of a step, segment by segment, from the marks of its trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

from fxmem.step.joined import Segment
from fxmem.step.measurement import Mark


@dataclass(frozen=True)
class Level:
    """Measured bytes of one segment: most before it, at its start, most within, and at its end."""

    before: int
    start: int
    peak: int
    end: int

    def over(self, base_bytes: int) -> Level:
        """The same, above `base_bytes`."""
        return Level(*(base_bytes + n for n in astuple(self)))

    def larger(self, other: Level) -> Level:
        """The larger of each number."""
        return Level(*map(max, astuple(self), astuple(other)))


def levels_of(marks: Iterable[Mark]) -> dict[Segment, Level]:
    """Over what stood at the start; as if no call had given back what it saved and run again before its backward."""
    found: dict[Segment, Level] = {}
    running: Segment | None = None
    before = start = given = 0
    given_back: dict[int, int] = {}
    for point in marks:
        kind, _, number = point.key.partition(" ")
        more = sum(given_back.values())
        level_bytes, peak_bytes = point.level_bytes + more, point.peak_bytes + more
        if kind == "H=":
            given_back[int(number)] = given - level_bytes
            continue
        if kind == "R=":  # forward has run again: all before is none of the backward's
            given_back.pop(int(number), None)
            continue
        if kind == "G=":
            given = level_bytes
            before = max(before, peak_bytes)
            continue
        if running is not None:
            level = Level(before, start, max(start, peak_bytes), level_bytes)
            found[running] = level.larger(found.pop(running, level))
            running, before = None, 0
        else:
            before = max(before, peak_bytes)
        if kind.endswith("+"):
            running, start = ("forward" if kind == "F+" else "backward", int(number)), level_bytes
        elif kind == "0" and found:  # what adds up gradients once the last backward has returned them
            last = next(reversed(found))
            found[last] = replace(found[last], peak=max(found[last].peak, before))
            before = 0
    return found
