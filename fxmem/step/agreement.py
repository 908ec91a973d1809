"""What the ranks of a process group measured of a step, so that all plan it alike.

A process group's own threads let go of a collective's buffer a moment after the step has, or not: what equal ranks
measure differs by that, and the plans made of it would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from typing import Any

from fxmem.step.episode import Episode, Measured
from fxmem.step.levels import Level
from fxmem.step.parallel import late_bytes
from fxmem.step.ranks import made_once

_NUM_SHARED = 8
"""Measurements of a kind of step: the store keeps them for good."""


class Agreement:
    """For the steps of one owner, which has the same number on every rank that compiles the same models."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._num_measured: Counter[str] = Counter()

    def on(self, episode: Episode, own: Measured, functions: Iterable[Callable[..., Any]]) -> Measured:
        """What the rank measured that came first, if it differs from `own` by late releases only; else `own`.

        What stands at the start of a step is each rank's own.
        """
        programs = [plan.program for plan in episode.plans]
        late = late_bytes(functions, programs)
        kind = str([program.fingerprint for program in programs] + [call.key[1:] for call in episode.calls])
        self._num_measured[kind] += 1
        if not late or self._num_measured[kind] > _NUM_SHARED:
            return own
        base = episode.start_bytes
        rows = [[n - base for n in numbers] for numbers in ((own.peak_bytes,), *map(astuple, own.levels.values()))]
        first = made_once(f"measured/{self._owner}/{kind}/{self._num_measured[kind]}", lambda: rows)
        if list(map(len, first)) != list(map(len, rows)) or _largest_difference(first, rows) > late:
            return own
        (peak_bytes,), *levels = ([base + n for n in numbers] for numbers in first)
        return Measured(peak_bytes, {s: Level(*level) for s, level in zip(own.levels, levels, strict=True)})


def _largest_difference(rows: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> int:
    return max(abs(a - b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True))
