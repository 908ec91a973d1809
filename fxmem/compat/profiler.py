"""The profiler as a log of allocations."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType

_profiler: Any = torch.autograd  # which re-exports the profiler's own calls, untyped


class _Holder:
    """The thread whose sessions run: Kineto serves one at a time in a process, and a second one crashes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    def take(self) -> bool:
        """For this thread; False: another one's session is open, or somebody's profiler runs."""
        with self._lock:
            if self.is_taken():
                return False
            self._thread = threading.get_ident()
            return True

    def give_back(self) -> None:
        with self._lock:
            self._thread = None

    def is_taken(self) -> bool:
        if torch.autograd.profiler._is_profiler_enabled or profiler_is_active():
            return True
        own = (None, threading.get_ident())
        return self._thread not in own and self._thread in {thread.ident for thread in threading.enumerate()}


_holder = _Holder()


def take_profiler() -> bool:
    """Keep it from other threads until `give_back_profiler`; False: there is a session, on this thread or another."""
    return _holder.take()


def give_back_profiler() -> None:
    """Other threads may have it."""
    _holder.give_back()


def profiler_is_taken() -> bool:
    """Would a session that is begun here meet another one, of this thread or of another?"""
    return _holder.is_taken()


def cpu_memory_deltas(function: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Run `function`: its result, and the bytes of each allocation (> 0) and release (< 0) on the CPU, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes two lines to stderr a session
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = function()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    on_cpu = [(e.start_ns(), e.nbytes()) for e in events if e.device_type() == DeviceType.CPU]
    return result, [nbytes for _, nbytes in sorted(on_cpu, key=lambda event: event[0])]


def profiler_is_active() -> bool:
    """Is a torch profiler running on this thread?"""
    return bool(_profiler._profiler_enabled())


def start_memory_log() -> None:
    """Log this thread's allocations, and no ops: costs microseconds an allocation. Raises RuntimeError if profiled."""
    from torch._C._profiler import ProfilerActivity, ProfilerConfig, ProfilerState, RecordScope, _ExperimentalConfig

    if profiler_is_active():
        raise RuntimeError("a profiler is active on this thread")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes two lines to stderr a session
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _profiler._prepare_profiler(config, {ProfilerActivity.CPU})
    _profiler._enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})


def stop_memory_log() -> list[tuple[str, int, int]]:
    """End the log: (range name or "", address, bytes) in order; bytes > 0 allocated, < 0 released, 0 for a range."""
    from torch._C._profiler import _EventType

    def walk(events: Any) -> Iterator[Any]:
        for event in events:
            yield event
            yield from walk(event.children)

    events = sorted(walk(_profiler._disable_profiler().experimental_event_tree()), key=lambda e: e.start_time_ns)
    log: list[tuple[str, int, int]] = []
    for event in events:
        if event.tag != _EventType.Allocation:
            log.append((event.name, 0, 0))
        elif event.typed[1].device.type == "cpu":
            log.append(("", event.typed[1].ptr, event.typed[1].alloc_size))
    return log
