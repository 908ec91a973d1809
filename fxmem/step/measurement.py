"""The allocator's truth about a step: peak bytes and seconds, on CPU and CUDA.

No dispatch mode is involved (one around a compiled call makes it run eagerly). On the CPU the allocator reports every
allocation and release to the profiler, which is started without any op event. What it does not report is the release of
memory that was allocated before: tensors that die within the measured code count until the last Python reference to
them goes away.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fxmem import compat
from fxmem.errors import FxmemError
from fxmem.step.held_tensors import reachable_tensors, storages
from fxmem.units import format_bytes

_GONE = "fxmem.gone"


@dataclass(frozen=True)
class Measurement:
    """`peak_bytes`: most bytes allocated at once on `device`. `seconds`: wall time, the device idle at both ends."""

    peak_bytes: int
    seconds: float
    device: str = "cpu"

    def __str__(self) -> str:
        return f"peak {format_bytes(self.peak_bytes)} on {self.device}, {self.seconds:.3f} s"


def measure(fn: Callable[[], Any], device: torch.device | str | None = None) -> Measurement:
    """Call `fn` once and return its peak on `device` (default: CUDA if `fn` holds tensors there, else the CPU).

    CPU: bytes of the tensors that `fn` holds when it starts (`held_tensors.reachable_tensors`; other models in the
    process don't count) plus what this thread allocates on top. CUDA: `max_memory_allocated` of the device.
    May be nested. Raises FxmemError inside somebody else's profiler, which would see nothing of the CPU's memory.
    """
    tensors = reachable_tensors(fn)
    device = torch.device(device) if device is not None else device_of(tensors)
    resident_bytes = sum(storages(tensors, device).values())
    with MemoryTrace(device, watched=tensors) as trace:
        del tensors
        started = time.perf_counter()
        fn()
        _synchronize(device)
        seconds = time.perf_counter() - started
    if trace.peak_delta_bytes is None:
        raise FxmemError("can't measure memory inside another profiler: measure outside of it")
    peak_bytes = trace.peak_allocated_bytes if device.type == "cuda" else resident_bytes + trace.peak_delta_bytes
    return Measurement(peak_bytes, seconds, str(device))


class MemoryTrace:
    """Peak between `begin` and `end` over what stood at `begin`; traces may overlap in any way on one thread.

    `peak_delta_bytes`: None until the end, and for good if another profiler was active at `begin` (or a trace was
    abandoned). `watched`: tensors whose death in between is to be noticed (CPU). `on_done(trace)` is called at the end;
    it must not raise (nobody could catch it).
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        watched: Iterable[Tensor] = (),
        on_done: Callable[[MemoryTrace], None] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.on_done = on_done
        self.peak_delta_bytes: int | None = None
        self.peak_allocated_bytes = 0
        self._watched: Iterable[Tensor] = list(watched)
        self._log: _CpuLog | _CudaLog | None = None

    def begin(self) -> bool:
        """Start; False (and nothing is measured) when another profiler is active on this thread."""
        watched, self._watched = self._watched, ()
        if self.device.type == "cuda":
            self._log = _CudaLog(self.device)
        elif _recorder.is_blocked():
            return False
        else:
            self._log = _CpuLog(watched)
        del watched
        self._log.begin()
        return True

    @property
    def is_running(self) -> bool:
        return self._log is not None

    def end(self) -> int | None:
        """Stop, however often it is called; returns `peak_delta_bytes`."""
        log, self._log = self._log, None
        on_done, self.on_done = self.on_done, None  # what it refers to may refer to the graph that holds this trace
        if log is not None:
            self.peak_delta_bytes, self.peak_allocated_bytes = log.end()
            if on_done is not None:
                on_done(self)
        return self.peak_delta_bytes

    def abandon(self) -> None:
        """Stop without a result."""
        log, self._log = self._log, None
        self.on_done = None
        if log is not None:
            log.end()

    def end_with_backward_of(self, outputs: Iterable[Any]) -> None:
        """End when the backward pass that starts at any of `outputs` ends; abandon when none can start any more."""
        roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        if not roots:
            self.end()
            return
        hook = _BackwardHook(self)
        weakref.finalize(hook, self.abandon).atexit = False
        for root in roots:
            root.register_hook(hook)

    def __enter__(self) -> MemoryTrace:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _BackwardHook:
    """Lives as long as the autograd graph of the outputs it is registered on."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace
        self.is_queued = False

    def __call__(self, grad: Tensor) -> None:
        if not self.is_queued:
            self.is_queued = True
            compat.queue_after_backward(_EndWhenDropped(self.trace))


class _EndWhenDropped:
    """Ends a trace when autograd drops it, which is when backward has returned to the thread's own state.

    Within the callback the profiler can't be stopped for good: autograd puts the thread's state back afterwards.
    """

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace

    def __call__(self) -> None:
        """Nothing to do yet."""

    def __del__(self) -> None:
        self.trace.end()


class _CpuLog:
    """One trace's view of the shared recorder: bytes above the start, by address."""

    def __init__(self, watched: Iterable[Tensor]) -> None:
        self.live: dict[int, int] = {}
        self.level = self.peak = 0
        self.finalizers = [
            weakref.finalize(tensor, _mark_gone, address, nbytes)
            for address, (tensor, nbytes) in _sole_owners(watched).items()
        ]
        for finalizer in self.finalizers:
            finalizer.atexit = False

    def begin(self) -> None:
        _recorder.add(self)

    def end(self) -> tuple[int, int]:
        _recorder.remove(self)
        for finalizer in self.finalizers:
            finalizer.detach()
        return self.peak, self.peak

    def feed(self, log: Iterable[tuple[str, int, int]]) -> None:
        for name, address, nbytes in log:
            if name.startswith(_GONE):
                self.level -= int(name.split()[1])
            elif nbytes > 0:
                self.live[address] = nbytes
                self.level += nbytes
                self.peak = max(self.peak, self.level)
            elif nbytes < 0:
                self.level -= self.live.pop(address, 0)


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


def _mark_gone(address: int, nbytes: int) -> None:
    with torch.profiler.record_function(f"{_GONE} {nbytes} {address}"):
        pass


class _Recorder(threading.local):
    """The one profiler session a thread can have, shared by all open traces: cut wherever one begins or ends."""

    def __init__(self) -> None:
        self.logs: list[_CpuLog] = []

    def is_blocked(self) -> bool:
        return not self.logs and compat.profiler_is_active()

    def add(self, log: _CpuLog) -> None:
        self._cut()
        self.logs.append(log)
        compat.start_memory_log()

    def remove(self, log: _CpuLog) -> None:
        self._cut()
        self.logs.remove(log)
        if self.logs:
            compat.start_memory_log()

    def _cut(self) -> None:
        if self.logs and compat.profiler_is_active():
            events = compat.stop_memory_log()
            for log in self.logs:
                log.feed(events)


_recorder = _Recorder()


class _CudaLog:
    """Peak of one device since the trace began; traces that overlap share the device's one peak counter."""

    open: ClassVar[list[_CudaLog]] = []

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = self.start = 0

    def begin(self) -> None:
        self._cut()
        self.start = self.peak = torch.cuda.memory_allocated(self.device)
        _CudaLog.open.append(self)

    def end(self) -> tuple[int, int]:
        self._cut()
        _CudaLog.open.remove(self)
        return self.peak - self.start, self.peak

    def _cut(self) -> None:
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        for log in _CudaLog.open:
            if log.device == self.device:
                log.peak = max(log.peak, peak)
        torch.cuda.reset_peak_memory_stats(self.device)


def device_of(tensors: Iterable[Tensor]) -> torch.device:
    """CUDA if any of `tensors` is there, else the CPU."""
    return next((t.device for t in tensors if t.device.type == "cuda"), torch.device("cpu"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
