"""Transfers for CPU devices: one thread per direction, copies without the interpreter lock."""

from __future__ import annotations

import ctypes
import functools
from functools import partial

import numpy as np
import torch

from fxmem.runtime.transfers.disk_file import DiskFile
from fxmem.runtime.transfers.engine import Engine, Hook, StepState, Transfer
from fxmem.runtime.transfers.layout import Layout
from fxmem.runtime.transfers.worker import Job, Worker

_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 1 << 20


class ThreadEngine(Engine):
    """Host and disk tiers of a CPU device. There "device" and "host" are the same RAM: only disk saves any."""

    def __init__(self, layout: Layout, file: DiskFile | None = None, hook: Hook | None = None) -> None:
        super().__init__(layout, file, hook)
        self._out, self._in = Worker("fxmem-offload"), Worker("fxmem-reload")
        self._jobs: dict[tuple[int, int, int], Job] = {}  # (step, slot, data pointer; -1: out) -> copy under way
        if layout.disk_bytes:
            return_freed_memory()

    def _start_out(self, state: StepState, transfer: Transfer) -> None:
        assert transfer.source is not None
        copy = partial(self._copy_out, state, transfer.slot, transfer.source)
        self._jobs[state.number, transfer.slot, -1] = self._out.submit(copy)

    def _copy_out(self, state: StepState, slot: int, source: torch.Tensor) -> None:
        self.hook("out", slot)
        arena, index = state.place(slot)
        if arena.layout.slots[index].tier == "host":
            np.copyto(arena.host_slot(index)[: source.numel()], source.numpy())
        else:
            assert arena.disk is not None
            arena.disk.write(source.numpy(), arena.file_offset(index))

    def _finish_out(self, state: StepState, transfer: Transfer) -> None:
        self._jobs.pop((state.number, transfer.slot, -1)).finish()

    def _start_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        copy = partial(self._copy_in, state, transfer.slot, target)
        self._jobs[state.number, transfer.slot, target.data_ptr()] = self._in.submit(copy)

    def _copy_in(self, state: StepState, slot: int, target: torch.Tensor) -> None:
        self.hook("in", slot)
        arena, index = state.place(slot)
        if arena.layout.slots[index].tier == "host":
            np.copyto(target.numpy(), arena.host_slot(index)[: target.numel()])
        else:
            assert arena.disk is not None
            arena.disk.read(target.numpy(), arena.file_offset(index))

    def _finish_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        self._jobs.pop((state.number, transfer.slot, target.data_ptr())).finish()

    def _quiesce(self, state: StepState) -> None:
        mine = [key for key in self._jobs if key[0] == state.number]
        for key in mine:
            self._jobs[key].cancel()
        for key in mine:
            self._jobs.pop(key).settle()

    def forget(self) -> None:
        super().forget()
        self._jobs.clear()

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        super().close()
        self._out.close()
        self._in.close()


@functools.cache
def return_freed_memory() -> bool:
    """Make glibc give freed tensors of 1 MiB and more back to the system at once; True if it could be told so.

    By default its threshold for that rises to 32 MiB as such blocks are freed, and the process keeps what it has freed.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018  (only glibc takes these parameters)
        return bool(libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES))
    except (OSError, AttributeError):
        return False
