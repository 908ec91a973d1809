"""The disk tier's file: round trips, failures of the system calls, leftovers of crashed processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.disk_file import CHUNK_BYTES, DiskFile, remove_leftovers, shared_file


class Calls:
    """`os`, with replaced calls."""

    def __init__(self, **replaced: Any) -> None:
        self.replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self.replaced.get(name, getattr(os, name))


def _data(nbytes: int) -> Any:
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)


def _round_trip(file: DiskFile, nbytes: int) -> None:
    offset, data, back = file.reserve(max(nbytes, 1)), _data(nbytes), np.zeros(nbytes, dtype=np.uint8)
    file.write(data, offset)
    file.read(back, offset)
    assert np.array_equal(data, back)


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_round_trip(tmp_path: Path, nbytes: int) -> None:
    with DiskFile(tmp_path) as file:
        _round_trip(file, nbytes)
    assert list(tmp_path.iterdir()) == []


def _refuses_direct(path: Any, flags: int, mode: int = 0o600) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.open(path, flags, mode)


def test_buffered_where_direct_access_is_refused(tmp_path: Path) -> None:
    with DiskFile(tmp_path, Calls(open=_refuses_direct)) as file:
        _round_trip(file, 100_001)


def test_direct_access_refused_late(tmp_path: Path) -> None:
    """Some file systems take the flag at open and refuse it at the first write."""
    import fcntl

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.pwrite(fd, data, offset)

    with DiskFile(tmp_path, Calls(pwrite=pwrite)) as file:
        _round_trip(file, 100_001)


def test_short_transfers_go_on(tmp_path: Path) -> None:
    def pwrite(fd: int, data: Any, offset: int) -> int:
        return os.pwrite(fd, data[:5000], offset)

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        return os.preadv(fd, [buffers[0][:777]], offset)

    with DiskFile(tmp_path, Calls(pwrite=pwrite, preadv=preadv, open=_refuses_direct)) as file:
        _round_trip(file, 20_001)


@pytest.mark.parametrize("direct", [True, False])
def test_write_that_moves_nothing(tmp_path: Path, direct: bool) -> None:
    calls = Calls(pwrite=lambda fd, data, offset: 0, **({} if direct else {"open": _refuses_direct}))
    with DiskFile(tmp_path, calls) as file, pytest.raises(OffloadError, match="short write"):
        file.write(_data(100), file.reserve(100))


def _raise(code: int) -> Any:
    def call(*args: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


def test_disk_full(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, calls := Calls(posix_fallocate=_raise(errno.ENOSPC)))
    with pytest.raises(OffloadError, match=r"No space left on device\); free space"):
        file.reserve(1 << 20)
    assert list(tmp_path.iterdir()) == []
    del calls.replaced["posix_fallocate"]
    offset = file.reserve(1 << 20)
    calls.replaced["pwrite"] = _raise(errno.ENOSPC)  # promised, and yet
    with pytest.raises(OffloadError, match=r"writing 100 B .*No space left"):
        file.write(_data(100), offset)
    file.release(offset, 1 << 20)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.EACCES, "writable"), (errno.EROFS, "read-only"), (errno.EDQUOT, "quota")]
)
def test_unwritable(tmp_path: Path, code: int, remedy: str) -> None:
    file = DiskFile(tmp_path, calls := Calls(open=_raise(code)))
    with pytest.raises(OffloadError, match=remedy):
        file.reserve(1)
    del calls.replaced["open"]
    _round_trip(file, 10)
    file.close()


def test_missing_folder(tmp_path: Path) -> None:
    file = DiskFile(tmp_path / "later")
    with pytest.raises(OffloadError, match="create the folder"):
        file.reserve(1)
    (tmp_path / "later").mkdir()
    _round_trip(file, 10)
    file.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(OffloadError, match="must be a folder"):
        DiskFile(tmp_path / "file").reserve(1)


def test_regions_are_used_again(tmp_path: Path) -> None:
    with DiskFile(tmp_path) as file:
        a, b = file.reserve(5000), file.reserve(4096)
        assert (a, b) == (0, 8192)
        file.release(a, 5000)
        assert file.reserve(8192) == 0
        assert file.path is not None
        assert file.path.stat().st_size == 12288
        file.release(0, 8192)
        file.release(b, 4096)
        assert file.path is None
        assert list(tmp_path.iterdir()) == []


_CHILD = """
import sys, time
from fxmem.runtime.transfers.disk_file import shared_file
shared_file(sys.argv[1]).reserve(1 << 20)
print("ready", flush=True)
if sys.argv[2] == "sleep":
    time.sleep(100)
if sys.argv[2] == "raise":
    raise RuntimeError("the training script failed")
"""


def _child(folder: Path, how: str) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder), how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.stdout.close()
    return child


def test_killed_process(tmp_path: Path) -> None:
    killed = _child(tmp_path, "sleep")
    (leftover,) = tmp_path.iterdir()
    assert remove_leftovers(tmp_path) == []  # its owner lives
    (tmp_path / "notes.txt").write_text("not ours")
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert leftover.exists()
    with DiskFile(tmp_path) as file:
        file.reserve(1)
        assert set(tmp_path.iterdir()) == {file.path, tmp_path / "notes.txt"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exit", "raise"])
def test_removed_at_exit(tmp_path: Path, how: str) -> None:
    _child(tmp_path, how).wait()
    assert list(tmp_path.iterdir()) == []


def test_one_file_per_process_and_folder(tmp_path: Path) -> None:
    assert shared_file(tmp_path) is shared_file(str(tmp_path))


def test_forked_child_keeps_its_hands_off(tmp_path: Path) -> None:
    with DiskFile(tmp_path) as file:
        offset = file.reserve(10)
        child = os.fork()
        if not child:
            try:
                file.write(_data(10), offset)
            except OffloadError:
                file.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert file.path is not None
        assert file.path.exists()
