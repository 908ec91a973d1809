"""A stub of `torch.cuda` with vector clocks: finds every pair of accesses that nothing orders, whatever the timing.

Streams, copying threads and the thread that calls are *actors*. Everything runs at once and in program order, so values
are always right; what counts is the clocks. An actor's clock says how much of every other actor's work has surely
happened before its next access. Two accesses to one byte of which one is a write must be ordered by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fxmem.runtime.transfers import arena, cuda
from fxmem.runtime.transfers.disk_file import Bytes, DiskFile

Clock = dict[str, int]
DISK = 1 << 62
"""Where the disk file's bytes lie among the addresses."""


class Race(BaseException):
    """Two accesses without an order. No Exception, for the engine makes an OffloadError of those."""


@dataclass(frozen=True)
class Access:
    """Bytes from `start` to `end`, by `actor`, as its access number `at`."""

    start: int
    end: int
    writes: bool
    actor: str
    at: int


@dataclass
class Watch:
    """Clocks of the actors, and every access since the last `forget`."""

    clocks: dict[str, Clock] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list)
    thread: str = "main"

    def clock(self, actor: str) -> Clock:
        return self.clocks.setdefault(actor, {})

    def order(self, before: Clock, actor: str) -> None:
        """What `actor` does from here on comes after all that `before` knows of."""
        mine = self.clock(actor)
        for name, count in before.items():
            mine[name] = max(mine.get(name, 0), count)

    def access(self, start: int, nbytes: int, writes: bool, actor: str | None = None) -> None:
        """Raises Race if an earlier access to these bytes may not have happened yet."""
        actor = actor or self.thread
        mine = self.clock(actor)
        mine[actor] = mine.get(actor, 0) + 1
        if not nbytes:  # a slot without bytes touches nothing, wherever it is laid
            return
        new = Access(start, start + nbytes, writes, actor, mine[actor])
        for old in self.accesses:
            clashes = old.start < new.end and new.start < old.end and (old.writes or writes)
            if clashes and old.at > mine.get(old.actor, 0):
                raise Race(f"{new} is not after {old}")
        kept = [old for old in self.accesses if not (writes and new.start <= old.start and old.end <= new.end)]
        self.accesses = [*kept, new]

    def compute(self, tensor: torch.Tensor, writes: bool) -> None:
        """A kernel on the stream that computes."""
        stream: Stream = torch.cuda.current_stream()  # type: ignore[assignment]
        self.order(self.clock(self.thread), stream.name)
        self.access(tensor.data_ptr(), tensor.numel(), writes, stream.name)

    def forget(self) -> None:
        """Bytes are somebody else's from here on."""
        self.accesses.clear()

    @contextmanager
    def on_thread(self, name: str) -> Iterator[None]:
        before, self.thread = self.thread, name
        try:
            yield
        finally:
            self.thread = before


WATCH = Watch()


class Event:
    """Knows what had happened when it was recorded; never recorded, it waits for nothing."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream) -> None:
        WATCH.order(WATCH.clock(WATCH.thread), stream.name)
        self.clock = dict(WATCH.clock(stream.name))

    def synchronize(self) -> None:
        WATCH.order(self.clock, WATCH.thread)


class Stream:
    """Its work comes after what the thread that queued it had done by then."""

    count = 0

    def __init__(self, device: Any = None) -> None:
        Stream.count += 1
        self.name = f"stream {Stream.count}"

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        WATCH.order(WATCH.clock(WATCH.thread), self.name)
        WATCH.order(event.clock, self.name)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Job:
    """Runs when it is submitted; only who waits for it comes after it."""

    def __init__(self, call: Callable[[], None], thread: str) -> None:
        WATCH.order(WATCH.clock(WATCH.thread), thread)
        self.error: Exception | None = None
        with WATCH.on_thread(thread):
            try:
                call()
            except Exception as error:
                self.error = error
        self.clock = dict(WATCH.clock(thread))

    def join(self) -> None:
        WATCH.order(self.clock, WATCH.thread)

    settle = join

    def finish(self) -> None:
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise error


class Worker:
    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, call: Callable[[], None]) -> Job:
        return Job(call, self.name)

    def close(self) -> None: ...


class File(DiskFile):
    """Notes what a write reads and a read writes."""

    def write(self, data: Bytes, offset: int) -> None:
        WATCH.access(data.ctypes.data, data.nbytes, writes=False)
        WATCH.access(DISK + offset, data.nbytes, writes=True)
        super().write(data, offset)

    def read(self, data: Bytes, offset: int) -> None:
        WATCH.access(DISK + offset, data.nbytes, writes=False)
        WATCH.access(data.ctypes.data, data.nbytes, writes=True)
        super().read(data, offset)


class Device:
    """The computing stream of `torch.cuda`, and copies that are noted with the stream they are queued on."""

    def __init__(self) -> None:
        self.computing = Stream()
        self.queued_on: list[Stream] = []

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.queued_on.append(stream)
        try:
            yield
        finally:
            self.queued_on.pop()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        stream = self.queued_on[-1]
        WATCH.order(WATCH.clock(WATCH.thread), stream.name)
        WATCH.access(source.data_ptr(), source.numel(), writes=False, actor=stream.name)
        WATCH.access(target.data_ptr(), target.numel(), writes=True, actor=stream.name)
        target.view(-1)[:] = source
        return target

    def synchronize(self) -> None:
        for clock in list(WATCH.clocks.values()):
            WATCH.order(clock, WATCH.thread)


class Watched(cuda.CudaEngine):
    def _empty(self, nbytes: int) -> torch.Tensor:
        """As from the caching allocator: computing kernels used these bytes up to now."""
        target = super()._empty(nbytes)
        WATCH.compute(target, writes=True)
        return target


def install(patch: pytest.MonkeyPatch) -> Device:
    """Replace what `CudaEngine` uses of `torch.cuda` and of threads, until `patch` is undone."""
    device = Device()
    WATCH.__init__()  # type: ignore[misc]
    patch.setattr(torch.cuda, "Event", Event)
    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "synchronize", device.synchronize)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch.setattr(torch.cuda, "current_stream", lambda _=None: device.computing)
    patch.setattr(torch.cuda, "stream", device.stream)
    patch.setattr(torch.cuda, "device", lambda _: device.stream(device.computing))
    patch.setattr(torch.Tensor, "copy_", lambda target, source, non_blocking: device.copy(target, source))
    patch.setattr(cuda, "Worker", Worker)
    patch.setattr(arena, "pin", lambda host, _: device.synchronize)
    return device
