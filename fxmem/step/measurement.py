"""The allocator's truth about a step: peak bytes and seconds, on CPU and CUDA.

No dispatch mode is involved (one around a compiled call makes it run eagerly). On the CPU the allocator reports every
allocation and release to the profiler, which is started without any op event. What it does not report is the release of
memory that was allocated before: tensors that die within the measured code count until the last Python reference to
them goes away.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxmem import compat
from fxmem.errors import FxmemError
from fxmem.step.held_tensors import reachable_tensors, storages
from fxmem.units import format_bytes

_GONE = "fxmem.gone"
_MARK = "fxmem.mark"


@dataclass(frozen=True)
class Measurement:
    """`peak_bytes`: most bytes allocated at once on `device`. `seconds`: wall time, the device idle at both ends.

    `events`, if asked for: (address, bytes) of every allocation (> 0) and release (< 0); first, at address 0, the bytes
    that stood at the start.
    """

    peak_bytes: int
    seconds: float
    device: str = "cpu"
    events: tuple[tuple[int, int], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return f"peak {format_bytes(self.peak_bytes)} on {self.device}, {self.seconds:.3f} s"


def measure(fn: Callable[[], Any], device: torch.device | str | None = None, *, events: bool = False) -> Measurement:
    """Call `fn` once and return its peak on `device` (default: CUDA if `fn` holds tensors there, else the CPU).

    CPU: bytes of the tensors that `fn` holds when it starts (`held_tensors.reachable_tensors`; other models in the
    process don't count) plus what this thread allocates on top. CUDA: `max_memory_allocated` of the device.
    `events`: note every allocation and release, too (CPU). May be nested. Raises FxmemError inside somebody else's
    profiler, which would see nothing of the CPU's memory.
    """
    tensors = reachable_tensors(fn)
    device = torch.device(device) if device is not None else device_of(tensors)
    resident_bytes = sum(storages(tensors, device).values())
    with MemoryTrace(device, watched=tensors, keeps_events=events) as trace:
        del tensors
        started = time.perf_counter()
        fn()
        _synchronize(device)
        seconds = time.perf_counter() - started
    if trace.peak_delta_bytes is None:
        raise FxmemError("can't measure memory inside another profiler: measure outside of it")
    peak_bytes = trace.peak_allocated_bytes if device.type == "cuda" else resident_bytes + trace.peak_delta_bytes
    log = ((0, resident_bytes), *trace.events) if trace.events else ()
    return Measurement(peak_bytes, seconds, str(device), log)


@dataclass(frozen=True)
class Mark:
    """A point of a trace. `level_bytes`: over what stood at the start; `peak_bytes`: most since the mark before."""

    key: str
    level_bytes: int
    peak_bytes: int


def mark(owner: int, key: str) -> None:
    """Put a mark into every open trace of `owner` on this thread.

    Between `key` and its end other owners' traces don't count allocations: "F+ 1" ... "F- 1". "0" ends all of them; a
    key like "G= 1" begins and ends nothing.
    """
    if _recorder.logs:
        with torch.profiler.record_function(f"{_MARK} {owner} {key}"):
            pass
    for log in _CudaLog.open:
        log.take_mark(owner, key)


class MemoryTrace:
    """Peak between `begin` and `end` over what stood at `begin`; traces may overlap in any way on one thread.

    `peak_delta_bytes`: None until the end, and for good if another profiler was active at `begin` or ended the trace's
    session, or the trace was abandoned. `watched`: tensors whose death in between is to be noticed (CPU).
    `owner`: whose marks it takes. `keeps_events`: `events` has every allocation and release at the end (CPU).
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        watched: Iterable[Tensor] = (),
        owner: int | None = None,
        keeps_events: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.owner = owner
        self.marks: list[Mark] = []
        self.events: list[tuple[int, int]] = []
        self._keeps_events = keeps_events
        self.peak_delta_bytes: int | None = None
        self.peak_allocated_bytes = 0
        self._watched: Iterable[Tensor] = list(watched)
        self._log: _CpuLog | _CudaLog | None = None

    def begin(self) -> bool:
        """Start; False (and nothing is measured) when another profiler is active, or another thread measures."""
        watched, self._watched = self._watched, ()
        if self.device.type == "cuda":
            self._log = _CudaLog(self.device, self.owner)
        elif not _recorder.is_ready():
            return False
        else:
            self._log = _CpuLog(watched, self.owner, self.events if self._keeps_events else None)
        del watched
        self._log.begin()
        return True

    @property
    def is_running(self) -> bool:
        return self._log is not None

    def end(self) -> int | None:
        """Stop, however often it is called; returns `peak_delta_bytes`."""
        log, self._log = self._log, None
        if log is not None:
            peak, self.peak_allocated_bytes = log.end()
            self.peak_delta_bytes = None if log.is_lost else peak
            self.marks = log.marks
        return self.peak_delta_bytes

    def level(self) -> tuple[int, Mapping[int, int]]:
        """(bytes over what stood at the start, address -> bytes of what was allocated since and stands), now."""
        if self._log is None:
            return 0, {}
        return self._log.now()

    def abandon(self) -> None:
        """Stop without a result."""
        log, self._log = self._log, None
        if log is not None:
            log.end()

    def __enter__(self) -> MemoryTrace:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _CpuLog:
    """One trace's view of the shared recorder: bytes above the start, by address."""

    def __init__(
        self, watched: Iterable[Tensor], owner: int | None, events: list[tuple[int, int]] | None = None
    ) -> None:
        self.events = events
        self.live: dict[int, int] = {}
        self.level = self.peak = self._peak_since = 0
        self.owner, self._num_foreign = owner, 0
        self.marks: list[Mark] = []
        self.is_lost = False
        owners = _sole_owners(watched)
        self._watched = {address: nbytes for address, (_, nbytes) in owners.items()}
        self.finalizers = [weakref.finalize(tensor, _mark_gone, address) for address, (tensor, _) in owners.items()]
        for finalizer in self.finalizers:
            finalizer.atexit = False

    def begin(self) -> None:
        _recorder.add(self)

    def end(self) -> tuple[int, int]:
        _recorder.remove(self)
        for finalizer in self.finalizers:
            finalizer.detach()
        return self.peak, self.peak

    def now(self) -> tuple[int, Mapping[int, int]]:
        _recorder.cut()
        return self.level, dict(self.live)

    def feed(self, log: Iterable[tuple[str, int, int]]) -> None:
        for name, address, nbytes in log:
            if self.events is not None and nbytes:
                self.events.append((address, nbytes))
            if name.startswith(_GONE):  # each log that counts it has asked for a mark, and sees all of them
                self.level -= self._watched.pop(int(name.split()[1]), 0)
            elif name.startswith(_MARK):
                _, owner, key = name.split(" ", 2)
                self._take_mark(int(owner), key)
            elif nbytes > 0:
                self.level -= self.live.pop(address, 0)  # another thread released it, which no log says: gloo's, say
                if self._num_foreign:
                    continue
                self.live[address] = nbytes
                self.level += nbytes
                self.peak, self._peak_since = max(self.peak, self.level), max(self._peak_since, self.level)
            elif nbytes < 0:
                self.level -= self.live.pop(address, 0)

    def _take_mark(self, owner: int, key: str) -> None:
        if owner == self.owner:
            self.marks.append(Mark(key, self.level, self._peak_since))
            self._peak_since = self.level
        elif self.owner is not None:
            change = {"+": 1, "-": -1, "=": 0}.get(key[1:2], -self._num_foreign)
            self._num_foreign = max(0, self._num_foreign + change)


def _sole_owners(tensors: Iterable[Tensor]) -> dict[int, tuple[Tensor, int]]:
    """address -> (tensor, bytes) of storages that exactly one of `tensors` lives in: its death is the storage's."""
    owners: dict[int, tuple[Tensor, int]] = {}
    shared: set[int] = set()
    for tensor in tensors:
        for address, nbytes in storages([tensor], torch.device("cpu")).items():
            if address in owners:
                shared.add(address)
            owners[address] = (tensor, nbytes)
    return {address: owner for address, owner in owners.items() if address not in shared}


def _mark_gone(address: int) -> None:
    with torch.profiler.record_function(f"{_GONE} {address}"):
        pass


class _Recorder(threading.local):
    """The one profiler session a thread can have, shared by all open traces: cut wherever one begins or ends."""

    def __init__(self) -> None:
        self.logs: list[_CpuLog] = []
        self.num_paused = 0

    def is_ready(self) -> bool:
        """May a log be added? The first one takes the profiler for this thread until the last one is removed."""
        return bool(self.logs) or compat.take_profiler()

    def add(self, log: _CpuLog) -> None:
        self._stop()
        self.logs.append(log)
        self._start()

    def remove(self, log: _CpuLog) -> None:
        self._stop()
        self.logs.remove(log)
        self._start()
        if not self.logs:
            compat.give_back_profiler()

    def cut(self) -> None:
        """Let every log know what has happened until now."""
        self._stop()
        self._start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is logged within, whose code may profile. What it allocates and keeps is not known to any log."""
        if self.num_paused:
            yield
            return
        self._stop()
        self.num_paused = 1
        try:
            yield
        finally:
            self.num_paused = 0
            self._start()

    def _start(self) -> None:
        if not self.logs or self.num_paused:
            return
        if compat.profiler_is_taken():
            self._lose()
        else:
            compat.start_memory_log()

    def _stop(self) -> None:
        if not self.logs or self.num_paused:
            return
        if not compat.profiler_is_active():
            self._lose()
            return
        events = compat.stop_memory_log()
        for log in self.logs:
            log.feed(events)

    def _lose(self) -> None:
        """Somebody else ended the session, or runs one: what was not seen can't be counted."""
        for log in self.logs:
            log.is_lost = True


_recorder = _Recorder()


def paused() -> contextlib.AbstractContextManager[None]:
    """No trace of this thread counts what is allocated within: compiling and profiling are no part of a step."""
    return _recorder.paused()


class _CudaLog:
    """Peak of one device since the trace began; traces that overlap share the device's one peak counter."""

    open: ClassVar[list[_CudaLog]] = []

    is_lost = False

    def __init__(self, device: torch.device, owner: int | None) -> None:
        self.device, self.owner = device, owner
        self.peak = self.start = self._peak_since = 0
        self.marks: list[Mark] = []

    def begin(self) -> None:
        self._cut()
        self.start = self.peak = self._peak_since = torch.cuda.memory_allocated(self.device)
        _CudaLog.open.append(self)

    def end(self) -> tuple[int, int]:
        self._cut()
        _CudaLog.open.remove(self)
        return self.peak - self.start, self.peak

    def now(self) -> tuple[int, Mapping[int, int]]:
        return torch.cuda.memory_allocated(self.device) - self.start, {}

    def take_mark(self, owner: int, key: str) -> None:
        """The allocator counts when the host asks for bytes, so a mark needs no synchronisation."""
        self._read_peak()
        if owner == self.owner:
            level = torch.cuda.memory_allocated(self.device)
            self.marks.append(Mark(key, level - self.start, self._peak_since - self.start))
            self._peak_since = level

    def _cut(self) -> None:
        torch.cuda.synchronize(self.device)
        self._read_peak()

    def _read_peak(self) -> None:
        peak = torch.cuda.max_memory_allocated(self.device)
        for log in _CudaLog.open:
            if log.device == self.device:
                log.peak, log._peak_since = max(log.peak, peak), max(log._peak_since, peak)
        torch.cuda.reset_peak_memory_stats(self.device)


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """CUDA if any of `tensors` is there, else the CPU."""
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
