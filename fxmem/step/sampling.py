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
        self.reset()

    def reset(self) -> None:
        """Count anew what `share` is of."""
        self._total_s = self._measured_s = 0.0
        self._num_measured = 0

    @property
    def share(self) -> float:
        """Of the time since the start, or `reset`: what measured steps took over the others."""
        usual_s = statistics.median(self._seconds[False]) if self._seconds[False] else 0.0
        return max(0.0, self._measured_s - self._num_measured * usual_s) / self._total_s if self._total_s else 0.0

    def begin(self, is_measured: bool) -> None:
        self._started_s, self._is_measured = time.perf_counter(), is_measured

    def end(self) -> None:
        if self._started_s is None:
            return
        seconds = time.perf_counter() - self._started_s
        self._started_s = None
        self._seconds[self._is_measured].append(seconds)
        self._total_s += seconds
        self._measured_s += seconds if self._is_measured else 0.0
        self._num_measured += self._is_measured
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
