"""Which sent messages have certainly arrived, told from what comes back: the runtime drops them then, and so does the
model of a rank's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Message: TypeAlias = tuple[str, int, int]
"""("F" to the next stage or "B" to the one before, sending stage, microbatch)."""
Row: TypeAlias = Sequence[tuple[int, str, int]]
"""A rank's actions with sends and receives, see `fxmem.compat.with_transfers`."""


class Arrivals:
    """A message has arrived for sure when its receiver has sent something that it computed no earlier than from it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._used_at: dict[Message, int] = {}  # (kind, using stage, microbatch) -> position in that rank's row
        self._rank_of: dict[int, int] = {}
        for rank, row in enumerate(rows):
            for position, (stage, kind, chunk) in enumerate(row):
                self._rank_of[stage] = rank
                if kind in ("F", "B", "I"):
                    self._used_at["F" if kind == "F" else "B", stage, chunk] = position
        self._last_heard: dict[int, int] = {}

    def use(self, kind: str, stage: int, chunk: int) -> None:
        """`stage` uses the message of that kind: its sender has run what made it."""
        source = stage + (-1 if kind == "F" else 1)
        if source in self._rank_of:
            rank = self._rank_of[source]
            self._last_heard[rank] = max(self._last_heard.get(rank, -1), self._used_at[kind, source, chunk])

    def has_arrived(self, message: Message) -> bool:
        kind, stage, chunk = message
        receiver = stage + (1 if kind == "F" else -1)
        return self._used_at[kind, receiver, chunk] <= self._last_heard.get(self._rank_of[receiver], -1)

    def forget(self) -> None:
        """A new step begins."""
        self._last_heard.clear()
