"""When a step of a known kind is measured again: now and then, so that measuring costs next to nothing."""

from __future__ import annotations

import statistics
import time
from collections import deque

SHARE = 0.005
"""Of the time that steps take: what measuring known ones may add."""
_NUM_KEPT = 9


class Sampling:
    """Seconds of measured and unmeasured steps decide how many are left out between two measured ones."""

    def __init__(self) -> None:
        self._seconds: dict[bool, deque[float]] = {True: deque(maxlen=_NUM_KEPT), False: deque(maxlen=_NUM_KEPT)}
        self._started_s: float | None = None
        self._is_measured = False
        self._since_s = 0.0  # unmeasured time since the last measured step

    def begin(self, is_measured: bool) -> None:
        self._started_s, self._is_measured = time.perf_counter(), is_measured

    def end(self) -> None:
        if self._started_s is None:
            return
        seconds = time.perf_counter() - self._started_s
        self._started_s = None
        self._seconds[self._is_measured].append(seconds)
        self._since_s = 0.0 if self._is_measured else self._since_s + seconds

    @property
    def is_due(self) -> bool:
        """Has enough time gone by since a known step was last measured?"""
        measured, others = (self._seconds[kind] for kind in (True, False))
        if not measured or len(others) < 3:
            return False
        usual_s = statistics.median(others)
        cost_s = max(statistics.median(measured) - usual_s, 0.02 * usual_s)
        return self._since_s * SHARE > cost_s
