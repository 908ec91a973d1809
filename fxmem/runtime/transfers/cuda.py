"""Transfers for CUDA devices: a D2H and an H2D stream, events, page-locked host memory; disk through host memory.

The stream that computes is read at every call. Blocks of the caching allocator never change hands behind its back:
instead of `record_stream`, both the computing stream and the one a block came from wait for the copy before it dies.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial

import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.arena import Arena
from fxmem.runtime.transfers.disk_file import Bytes, DiskFile
from fxmem.runtime.transfers.engine import Engine, Hook, Moment, Step, StepState, Transfer
from fxmem.runtime.transfers.layout import Layout
from fxmem.runtime.transfers.worker import Job, Worker


@dataclass(eq=False)
class _Copy:
    """A copy under way: done on its stream at `done`; `stream` is where its device block came from.

    `job` is the part on a thread: for a disk reload, `done` means something only after it.
    """

    done: torch.cuda.Event
    stream: torch.cuda.Stream
    job: Job | None = None


@dataclass(eq=False)
class _Stages:
    """Who used which bytes of an arena's staging area last: a write to disk, or a disk reload."""

    users: list[tuple[Bytes, Job, torch.cuda.Event | None]] = field(default_factory=list)

    def earlier(self, place: Bytes) -> list[tuple[Job, torch.cuda.Event | None]]:
        """Users of bytes in `place`: whoever writes there next must let them finish."""
        return [(job, event) for theirs, job, event in self.users if _overlap(place, theirs)]

    def add(self, place: Bytes, job: Job, event: torch.cuda.Event | None) -> None:
        """A user that waits for the earlier ones; those with bytes outside of `place` are still to be waited for."""
        self.users = [user for user in self.users if not _covers(place, user[0])]
        self.users.append((place, job, event))


class CudaEngine(Engine):
    """Host and disk tiers of one CUDA device. `layout.staged` must be set if any slot is on disk."""

    def __init__(
        self, layout: Layout, device: torch.device, file: DiskFile | None = None, hook: Hook | None = None
    ) -> None:
        super().__init__(layout, file, hook)
        self.device = self.pinned_for = device
        self.d2h, self.h2d = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._write, self._read = Worker("fxmem-disk-write"), Worker("fxmem-disk-read")
        self._copies: dict[tuple[int, int, int], _Copy] = {}  # (step, slot, data pointer; -1: out)
        self._writes: dict[tuple[int, int], Job] = {}  # (step, slot) -> host memory to disk
        self._stages: weakref.WeakKeyDictionary[Arena, _Stages] = weakref.WeakKeyDictionary()

    def begin(self) -> Step:
        """Also raises OffloadError while a CUDA graph is captured: disk and host have no part in one."""
        if torch.cuda.is_current_stream_capturing():
            raise OffloadError(
                "offload: a CUDA graph is being captured, and transfers can't be part of one; "
                'compile without tiers, or without CUDA graphs (mode="reduce-overhead")'
            )
        return super().begin()

    def _start_out(self, state: StepState, transfer: Transfer) -> None:
        assert transfer.source is not None
        arena, index = state.place(transfer.slot)
        on_disk = arena.layout.slots[index].tier == "disk"
        host = (arena.stage(index, 0) if on_disk else arena.host_slot(index))[: transfer.nbytes]
        if on_disk:
            for job, event in self._stages_of(arena).earlier(host):
                job.join()
                if event is not None:
                    self.d2h.wait_event(event)
        copy = self._enqueue(self.d2h, torch.from_numpy(host), transfer.source, "out", transfer.slot)
        self._copies[state.number, transfer.slot, -1] = copy
        transfer.copied = copy.done
        if on_disk:
            assert arena.disk is not None
            job = self._write.submit(partial(_write, copy.done, host, arena.disk, arena.file_offset(index)))
            self._writes[state.number, transfer.slot] = job
            self._stages_of(arena).add(host, job, None)

    def _finish_out(self, state: StepState, transfer: Transfer) -> None:
        self._wait_for(self._copies.pop((state.number, transfer.slot, -1)))

    def _start_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        arena, index = state.place(transfer.slot)
        key = (state.number, transfer.slot, target.data_ptr())
        if arena.layout.slots[index].tier == "host":
            host = arena.host_slot(index)[: transfer.nbytes]
            self.h2d.wait_event(transfer.copied)
            self._copies[key] = self._enqueue(self.h2d, target, torch.from_numpy(host), "in", transfer.slot)
            return
        host = arena.stage(index, transfer.num_reloads)[: transfer.nbytes]
        earlier = self._stages_of(arena).earlier(host)
        written = self._writes[state.number, transfer.slot]
        stream = torch.cuda.current_stream(self.device)
        copy = self._copies[key] = _Copy(torch.cuda.Event(), stream)
        ready = stream.record_event()

        def read() -> None:
            """Disk to host memory, then H2D; runs on the reading thread."""
            for job, event in earlier:
                job.join()
                if event is not None:
                    event.synchronize()
            written.finish()
            assert arena.disk is not None
            arena.disk.read(host, arena.file_offset(index))
            self._copy_in(copy, ready, target, host, transfer.slot)

        copy.job = self._read.submit(read)
        self._stages_of(arena).add(host, copy.job, copy.done)

    def _copy_in(self, copy: _Copy, ready: torch.cuda.Event, target: torch.Tensor, host: Bytes, slot: int) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self.h2d):
            self.h2d.wait_event(ready)
            self.hook("in", slot)
            target.copy_(torch.from_numpy(host), non_blocking=True)
            copy.done.record(self.h2d)

    def _finish_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        copy = self._copies.pop((state.number, transfer.slot, target.data_ptr()))
        try:
            if copy.job is not None:
                copy.job.finish()
        finally:
            self._wait_for(copy)

    def _enqueue(
        self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor, moment: Moment, slot: int
    ) -> _Copy:
        computing = torch.cuda.current_stream(self.device)
        stream.wait_event(computing.record_event())
        with torch.cuda.stream(stream):
            self.hook(moment, slot)
            target.copy_(source, non_blocking=True)
            return _Copy(stream.record_event(), computing)

    def _wait_for(self, copy: _Copy) -> None:
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copy.done)
        if copy.stream != computing:
            copy.stream.wait_event(copy.done)

    def _stages_of(self, arena: Arena) -> _Stages:
        return self._stages.setdefault(arena, _Stages())

    def _quiesce(self, state: StepState) -> None:
        copies = [self._copies.pop(key) for key in list(self._copies) if key[0] == state.number]
        jobs = [self._writes.pop(key) for key in list(self._writes) if key[0] == state.number]
        for job in (*jobs, *(copy.job for copy in copies if copy.job is not None)):
            job.settle()
        for copy in copies:
            self._wait_for(copy)
        self.d2h.wait_stream(self.h2d)  # the next step's copies out must not overtake this one's copies in

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def close(self) -> None:
        super().close()
        self._write.close()
        self._read.close()


def _write(copied: torch.cuda.Event, host: Bytes, file: DiskFile, offset: int) -> None:
    """Host memory to disk once the D2H copy is done; runs on the writing thread."""
    copied.synchronize()
    file.write(host, offset)


def _overlap(a: Bytes, b: Bytes) -> bool:
    start, other = a.ctypes.data, b.ctypes.data
    return start < other + b.nbytes and other < start + a.nbytes


def _covers(a: Bytes, b: Bytes) -> bool:
    start, other = a.ctypes.data, b.ctypes.data
    return start <= other and other + b.nbytes <= start + a.nbytes
