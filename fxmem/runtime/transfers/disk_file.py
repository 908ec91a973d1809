"""The disk tier's file: one per process and folder, preallocated, unbuffered where the file system allows it.

The file is locked (flock) while its process lives; an unlocked one was left by a crash and is removed by the next
process that opens a file in the same folder. It is removed when its last region is given back, and at exit.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.layout import ALIGNMENT_BYTES, FreeList
from fxmem.units import align_up, format_bytes

PREFIX = "fxmem-offload-"
CHUNK_BYTES = 8 << 20
"""Bytes per unbuffered read or write: each copying thread holds one aligned buffer of this size."""

Bytes = npt.NDArray[np.uint8]


class FileCalls(Protocol):
    """The system calls that can fail; `os` is one, tests hand in another."""

    def open(self, path: Any, flags: int, mode: int = ..., /) -> int: ...
    def pwrite(self, fd: int, data: Any, offset: int, /) -> int: ...
    def preadv(self, fd: int, buffers: Any, offset: int, /) -> int: ...
    def posix_fallocate(self, fd: int, offset: int, length: int, /) -> None: ...


def offload_error(what: str, path: Path, cause: OSError) -> OffloadError:
    """An OffloadError that says what to do about `cause`."""
    remedies = {
        errno.ENOSPC: "free space there, name another offload_dir, or raise the budget",
        errno.EDQUOT: "the quota is used up: free space there or name another offload_dir",
        errno.EACCES: "make the folder writable or name another offload_dir",
        errno.EROFS: "the file system is read-only: name another offload_dir",
        errno.ENOENT: "create the folder or name another offload_dir",
        errno.ENOTDIR: "offload_dir must be a folder",
    }
    remedy = remedies.get(cause.errno or 0, "check the disk or name another offload_dir")
    return OffloadError(f"offload to disk: {what} {path} failed ({cause.strerror or cause}); {remedy}")


class DiskFile:
    """Regions of one file in `folder`. Reads and writes may come from several threads at once."""

    def __init__(self, folder: str | Path, calls: FileCalls = os) -> None:
        self.folder = Path(folder)
        self._calls = calls
        self._pid = os.getpid()
        self._fd = -1
        self._direct = False
        self._path = self.folder
        self._allocated_bytes = 0
        self._free_list = FreeList()
        self._lock = threading.Lock()
        self._local = threading.local()

    @property
    def path(self) -> Path | None:
        """The file, or None while none is needed."""
        return self._path if self._fd >= 0 else None

    @property
    def used_bytes(self) -> int:
        return self._free_list.used_bytes

    def reserve(self, nbytes: int) -> int:
        """Offset of a region of `nbytes` (rounded to blocks) that the file system has promised. Raises OffloadError."""
        nbytes = align_up(nbytes, ALIGNMENT_BYTES["disk"])
        with self._lock:
            if self._fd < 0:
                self._open()
            offset = self._free_list.allocate(nbytes)
            try:
                if self._free_list.end > self._allocated_bytes:
                    self._calls.posix_fallocate(
                        self._fd, self._allocated_bytes, self._free_list.end - self._allocated_bytes
                    )
                    self._allocated_bytes = self._free_list.end
            except OSError as cause:
                self._give_back(offset, nbytes)
                raise offload_error(f"reserving {format_bytes(nbytes)} in", self._path, cause) from cause
            return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Give a region back; the file goes with the last one."""
        with self._lock:
            if self._fd >= 0:
                self._give_back(offset, align_up(nbytes, ALIGNMENT_BYTES["disk"]))

    def _give_back(self, offset: int, nbytes: int) -> None:
        self._free_list.release(offset, nbytes)
        if not self._free_list.used_bytes:
            self._remove()

    def write(self, data: Bytes, offset: int) -> None:
        """Write all of `data` (uint8, contiguous) at `offset`. Raises OffloadError."""
        try:
            if not self._direct:
                self._transfer(data, offset, out=True)
                os.fdatasync(self._fd)
                os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)
                return
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                chunk = self._chunk()[: align_up(len(piece), ALIGNMENT_BYTES["disk"])]
                np.copyto(chunk[: len(piece)], piece)
                self._transfer(chunk, offset + start, out=True)
        except OSError as cause:
            raise offload_error(f"writing {format_bytes(len(data))} to", self._path, cause) from cause

    def read(self, data: Bytes, offset: int) -> None:
        """Fill `data` (uint8, contiguous) from `offset`. Raises OffloadError."""
        try:
            if not self._direct:
                self._transfer(data, offset, out=False)
                os.posix_fadvise(self._fd, offset, len(data), os.POSIX_FADV_DONTNEED)
                return
            for start in range(0, len(data), CHUNK_BYTES):
                piece = data[start : start + CHUNK_BYTES]
                chunk = self._chunk()[: align_up(len(piece), ALIGNMENT_BYTES["disk"])]
                self._transfer(chunk, offset + start, out=False)
                np.copyto(piece, chunk[: len(piece)])
        except OSError as cause:
            raise offload_error(f"reading {format_bytes(len(data))} from", self._path, cause) from cause

    def _transfer(self, data: Bytes, offset: int, out: bool) -> None:
        """All of `data`, over as many calls as it takes; a call that moves nothing is an error."""
        if self._fd < 0 or self._pid != os.getpid():
            raise OSError(errno.EBADF, "the file belongs to another process or was closed")
        done = 0
        while done < len(data):
            rest = data[done:]
            try:
                num = self._call(rest, offset + done, out)
            except OSError as cause:
                if cause.errno != errno.EINVAL or not self._direct:
                    raise
                self._buffer_again()  # the file system took O_DIRECT at open, or a short write broke the alignment
                continue
            if num <= 0:
                raise OSError(errno.EIO, f"short {'write' if out else 'read'}: {done} of {len(data)} bytes")
            done += num

    def _call(self, rest: Bytes, offset: int, out: bool) -> int:
        return self._calls.pwrite(self._fd, rest, offset) if out else self._calls.preadv(self._fd, [rest], offset)

    def _buffer_again(self) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._direct = False

    def _chunk(self) -> Bytes:
        chunk: Bytes | None = getattr(self._local, "chunk", None)
        if chunk is None:
            chunk = self._local.chunk = np.frombuffer(mmap.mmap(-1, CHUNK_BYTES), dtype=np.uint8)
        return chunk

    def _open(self) -> None:
        try:
            remove_leftovers(self.folder)
            for attempt in range(100):
                path = self.folder / f"{PREFIX}{os.getpid()}-{id(self):x}-{attempt}"
                fd, direct = self._create(path)
                if _is_locked_by_us(fd, path):
                    break
                os.close(fd)  # a starting neighbour took it for a leftover
            else:
                raise OSError(errno.EAGAIN, "no file could be locked there")
        except OSError as cause:
            raise offload_error("creating a file in", self.folder, cause) from cause
        self._fd, self._direct, self._path = fd, direct, path
        self._allocated_bytes = 0
        _OPEN.add(self)

    def _create(self, path: Path) -> tuple[int, bool]:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return self._calls.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as cause:
            if cause.errno != errno.EINVAL:
                raise
        path.unlink(missing_ok=True)  # some file systems create it before they refuse the flag
        return self._calls.open(path, flags, 0o600), False

    def close(self) -> None:
        """Remove the file, whatever is in it."""
        with self._lock:
            self._free_list = FreeList()
            self._remove()

    def _remove(self) -> None:
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        self._free_list = FreeList()
        _OPEN.discard(self)
        if self._pid == os.getpid():
            self._path.unlink(missing_ok=True)
        os.close(fd)

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the files in `folder` whose process is gone; returns them."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or gone this moment
        try:
            if _is_locked_by_us(fd, path):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _is_locked_by_us(fd: int, path: Path) -> bool:
    """Lock `fd` if nobody holds it; False too if `path` is not that file any more."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        here, there = os.fstat(fd), os.stat(path)
    except (BlockingIOError, FileNotFoundError):
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


_OPEN: set[DiskFile] = set()
_SHARED: dict[tuple[int, Path], DiskFile] = {}


def shared_file(folder: str | Path) -> DiskFile:
    """This process's file in `folder`."""
    where = Path(folder).absolute()
    return _SHARED.setdefault((os.getpid(), where), DiskFile(where))


@atexit.register
def _close_all() -> None:
    closers: list[Callable[[], None]] = [file.close for file in _OPEN]
    for close in closers:
        close()


def _disown() -> None:
    """In a forked child: the files are the parent's."""
    for file in _OPEN:
        os.close(file._fd)
        file._fd, file._lock = -1, threading.Lock()
    _OPEN.clear()


os.register_at_fork(after_in_child=_disown)
