"""Planning effort: counted, not timed, so that a plan does not depend on what else the machine does.

A time limit on planning is a limit on work: what a reference core does in that many seconds. The
same request gives the same plan on a busy machine, later, but no other one.
"""

from __future__ import annotations

import ctypes

WORK_PER_S = 45e6
"""Kernel visits a second of the compiled planner on the reference core (35 to 60 million, by instance)."""
_MOST_S = 1e9


class Effort:
    """A clock that planners move: the compiled kernel by counting, the rest by what is known of its cost."""

    def __init__(self) -> None:
        self._work = ctypes.c_int64(0)

    @property
    def work(self) -> int:
        """Units done so far."""
        return self._work.value

    @property
    def address(self) -> int:
        """Where compiled code counts."""
        return ctypes.addressof(self._work)

    def now(self) -> float:
        """Seconds of the reference core spent so far."""
        return self._work.value / WORK_PER_S

    def spend(self, seconds: float) -> None:
        """Count work that compiled code does not count itself."""
        self._work.value += int(seconds * WORK_PER_S)


def work_until(deadline_s: float) -> int:
    """A deadline in units of work; 0 (none) stays 0."""
    return round(min(deadline_s, _MOST_S) * WORK_PER_S)
