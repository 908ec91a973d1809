"""Arenas: the bytes of one step in flight on the host and on disk, taken whole and used again by later steps."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.disk_file import Bytes, DiskFile
from fxmem.runtime.transfers.layout import Layout
from fxmem.units import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device


@dataclass(eq=False)
class Arena:
    """Room for every slot of `layout`: `host` (slots, then staging area), a region of `disk` at `disk_offset`."""

    layout: Layout
    host: Bytes
    disk: DiskFile | None = None
    disk_offset: int = 0
    unpin: Callable[[], None] | None = None

    def host_slot(self, slot: int) -> Bytes:
        place = self.layout.slots[slot]
        return self.host[place.offset : place.offset + place.nbytes]

    def stage(self, slot: int, use: int) -> Bytes:
        """Staging bytes of `slot`: use 0 is the way out, use k its k-th reload (repeated if a backward runs again)."""
        place = self.layout.slots[slot]
        index = use if use < 1 else 1 + (use - 1) % (len(place.stage_offsets) - 1)
        start = self.layout.host_bytes + place.stage_offsets[index]
        return self.host[start : start + place.nbytes]

    def file_offset(self, slot: int) -> int:
        return self.disk_offset + self.layout.slots[slot].offset

    def close(self) -> None:
        if self.disk is not None:
            self.disk.release(self.disk_offset, self.layout.disk_bytes)
            self.disk = None
        if self.unpin is not None:
            self.unpin()
            self.unpin = None
        self.host = np.empty(0, dtype=np.uint8)


def open_arena(layout: Layout, file: DiskFile | None, pinned_for: torch.device | None) -> Arena:
    """Allocate; `pinned_for`: page-locked host memory for that CUDA device.

    Raises OffloadError and leaves nothing behind.
    """
    nbytes = layout.host_bytes + layout.stage_bytes
    arena = Arena(layout, host_bytes(nbytes))
    try:
        if pinned_for is not None and nbytes:
            arena.unpin = pin(arena.host, pinned_for)
        if layout.disk_bytes:
            if file is None:
                raise OffloadError("offload to disk: no offload_dir was named")
            arena.disk_offset = file.reserve(layout.disk_bytes)
            arena.disk = file
    except BaseException:
        arena.close()
        raise
    return arena


def host_bytes(nbytes: int) -> Bytes:
    """`nbytes` of page-aligned memory that goes back to the system when it dies. Raises OffloadError."""
    if not nbytes:
        return np.empty(0, dtype=np.uint8)
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    except (OSError, MemoryError, OverflowError) as cause:
        raise _refused(nbytes, cause) from cause


def pin(host: Bytes, device: torch.device) -> Callable[[], None]:
    """Page-lock `host` in place for copies of `device`; returns what undoes it. Raises OffloadError.

    Exactly its bytes: torch's pinned allocator would round up to a power of two.
    """
    runtime = torch.cuda.cudart()
    code = runtime.cudaHostRegister(host.ctypes.data, host.nbytes, _PORTABLE)
    if int(code) != 0:
        with contextlib.suppress(RuntimeError):  # the failure is this thread's last error: the next launch takes it for
            torch.zeros(1, device=device)  # its own, raises it, and so clears it
        raise _refused(host.nbytes, RuntimeError(f"cudaHostRegister: {code}"))
    address = host.ctypes.data

    def unpin() -> None:
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(address)

    return unpin


def _refused(nbytes: int, cause: BaseException) -> OffloadError:
    return OffloadError(
        f"offload to host: {format_bytes(nbytes)} of host memory were refused ({cause}); "
        "free host memory, raise the limit on (locked) memory, use tiers='disk', or raise the budget"
    )
