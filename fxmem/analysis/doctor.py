"""What is here: torch, devices, compiler, and how fast bytes move between device, host memory and disk."""

from __future__ import annotations

import contextlib
import importlib.metadata
import mmap
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fxmem.analysis import cache
from fxmem.analysis.devices import DeviceSpec, device_spec, planning_link
from fxmem.analysis.profile import device_name, free_bytes
from fxmem.errors import OffloadError
from fxmem.schedule.actions import Tier
from fxmem.schedule.simulate import Link, Machine

_DISK_BYTES = 128 * 2**20  # written and read again, at most
_CHUNK_BYTES = 8 * 2**20
_DISK_LIMIT_S = 2.0  # per direction
_COPY_BYTES = 64 * 2**20
_NUM_REPEATS = 5
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Device:
    """An accelerator, or the CPU with its memory. `host_link`: measured copies to and from host memory."""

    name: str
    kind: str
    memory_bytes: int
    host_link: Link


@dataclass(frozen=True)
class Examination:
    """What is here. Bandwidths are measured; plans are made for a little less (`planning_link`).

    `disk_is_direct`: the disk was measured past the page cache; if not, its read bandwidth may be the cache's.
    """

    fxmem: str
    python: str
    torch: str
    platform: str
    num_threads: int
    c_compiler: str | None
    devices: tuple[Device, ...]
    host_free_bytes: int
    offload_dir: str
    disk_free_bytes: int
    disk_link: Link
    disk_is_direct: bool


def examine(offload_dir: str | Path | None = None, *, refresh: bool = False) -> Examination:
    """Look at this machine; `refresh` measures again. Raises OSError if `offload_dir` is unusable."""
    directory = offload_folder(offload_dir)
    disk, is_direct = disk_link(directory, refresh=refresh)
    kinds = [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]
    return Examination(
        fxmem=_version(),
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        num_threads=torch.get_num_threads(),
        c_compiler=next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None),
        devices=tuple(Device(device_name(k), k, _memory_bytes(k), host_link(k, refresh=refresh)) for k in kinds),
        host_free_bytes=free_bytes("cpu"),
        offload_dir=str(directory),
        disk_free_bytes=shutil.disk_usage(directory).free,
        disk_link=disk,
        disk_is_direct=is_direct,
    )


def machine(
    tiers: Iterable[Tier], offload_dir: str | Path | None = None, spec: str | Path | DeviceSpec | None = None
) -> Machine:
    """Links of `tiers` for the simulator: of `spec` if named, else measured here; planned bandwidth, not nominal.
    A tier may take all of the disk that is free here, and half of the free host memory.

    Raises OptionError for an unknown spec, OffloadError if offload_dir is unusable.
    """
    if spec is not None:
        return device_spec(spec).machine(tiers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    measure: dict[Tier, Callable[[], Link]] = {
        "host": lambda: host_link(device),
        "disk": lambda: disk_link(offload_folder(offload_dir))[0],
    }
    room: dict[Tier, Callable[[], int]] = {
        "host": lambda: free_bytes("cpu") // 2,
        "disk": lambda: shutil.disk_usage(offload_folder(offload_dir)).free,
    }
    names = tuple(tiers)
    try:
        return Machine({tier: planning_link(measure[tier]()) for tier in names}, {tier: room[tier]() for tier in names})
    except OSError as error:
        raise OffloadError(f"offload_dir {offload_folder(offload_dir)} can't be used: {error}") from error


def host_link(device: str, *, refresh: bool = False) -> Link:
    """Measured copies between `device` and (pinned) host memory; on the CPU one thread's copy within memory."""
    path = cache.cache_file("host-link", torch.__version__, device_name(device))
    cached = None if refresh else _link_from(cache.load(path).get("link"))
    if cached is not None:
        return cached
    link = _measure_cuda_link(device) if torch.device(device).type == "cuda" else _measure_memory_link()
    cache.update(path, {"link": asdict(link)})
    return link


def disk_link(directory: Path, *, refresh: bool = False) -> tuple[Link, bool]:
    """Measured writes and reads of one bounded file in `directory`, and whether they went past the page cache."""
    path = cache.cache_file("disk", os.stat(directory).st_dev, directory.resolve())
    entry = {} if refresh else cache.load(path)
    cached = _link_from(entry.get("link"))
    if cached is not None and isinstance(entry.get("direct"), bool):
        return cached, entry["direct"]
    link, is_direct = _measure_disk(directory)
    cache.update(path, {"link": asdict(link), "direct": is_direct})
    return link, is_direct


def _link_from(data: Any) -> Link | None:
    """The cached link, unless the entry is missing or damaged."""
    with contextlib.suppress(TypeError, ValueError):
        link = Link(**{name: float(value) for name, value in data.items()}) if isinstance(data, dict) else None
        if link is not None and min(link.out_bytes_per_s, link.in_bytes_per_s) > 0 <= link.latency_s:
            return link
    return None


def offload_folder(named: str | Path | None) -> Path:
    """The folder of the disk tier: `named`, or the system's for temporary files."""
    return Path(named) if named is not None else Path(tempfile.gettempdir())


def why_unusable(folder: Path) -> str | None:
    """Why nothing can be offloaded to `folder`; None if it can."""
    try:
        with tempfile.TemporaryFile(prefix="fxmem-", dir=folder):
            free_bytes = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        return getattr(error, "strerror", None) or str(error)
    needed_bytes = 4 * _CHUNK_BYTES
    return f"it has room for {free_bytes} bytes only, not {needed_bytes}" if free_bytes < needed_bytes else None


def _version() -> str:
    try:
        return importlib.metadata.version("fxmem")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _memory_bytes(device: str) -> int:
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _measure_memory_link() -> Link:
    """Both directions are the same copy: host memory is the CPU's own."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    # numpy copies in one thread, whatever torch's number of threads
    to, from_ = target.numpy(), source.numpy()
    seconds = _median_s(lambda: np.copyto(to, from_))
    latency_s = _median_s(lambda: np.copyto(to[:64], from_[:64]))
    bytes_per_s = _COPY_BYTES / max(seconds, 1e-9)
    return Link(bytes_per_s, bytes_per_s, latency_s)


def _measure_cuda_link(device: str) -> Link:
    host = torch.ones(_COPY_BYTES, dtype=torch.uint8).pin_memory()
    on_device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)

    def seconds(copy: Callable[[], Any]) -> float:
        def finish() -> None:
            copy()
            torch.cuda.synchronize(device)

        return _median_s(finish)

    out_s = seconds(lambda: host.copy_(on_device, non_blocking=True))
    in_s = seconds(lambda: on_device.copy_(host, non_blocking=True))
    latency_s = seconds(lambda: on_device[:64].copy_(host[:64], non_blocking=True))
    return Link(_COPY_BYTES / out_s, _COPY_BYTES / in_s, latency_s)


def _median_s(run: Callable[[], Any]) -> float:
    run()
    times = []
    for _ in range(_NUM_REPEATS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _measure_disk(directory: Path) -> tuple[Link, bool]:
    """Write, sync and read back one file, which is removed. Never takes more than a quarter of the free space."""
    num_bytes = min(_DISK_BYTES, shutil.disk_usage(directory).free // 4) // _CHUNK_BYTES * _CHUNK_BYTES
    if not num_bytes:
        raise OSError(f"{directory} has no room for {4 * _CHUNK_BYTES} bytes: it can't be used for offloading")
    handle, name = tempfile.mkstemp(prefix="fxmem-", suffix=".probe", dir=directory)
    os.close(handle)
    buffer = mmap.mmap(-1, _CHUNK_BYTES)  # page-aligned, as direct access wants it
    buffer.write(os.urandom(_CHUNK_BYTES))
    try:
        with _opened(name, os.O_WRONLY) as (file, is_direct):
            out_bytes_per_s, written = _stream(lambda _: os.write(file, buffer), num_bytes, lambda: os.fsync(file))
            if not is_direct and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        with _opened(name, os.O_RDONLY) as (file, is_direct):
            in_bytes_per_s, _ = _stream(lambda at: os.preadv(file, [buffer], at), written, lambda: None)
            page = memoryview(buffer)[:_PAGE_BYTES]
            latency_s = _median_s(lambda: os.preadv(file, [page], 0))
            page.release()
    finally:
        buffer.close()
        os.unlink(name)
    return Link(out_bytes_per_s, in_bytes_per_s, latency_s), is_direct


@contextlib.contextmanager
def _opened(name: str, flags: int) -> Iterator[tuple[int, bool]]:
    """(file descriptor, past the page cache?): falls back where the file system knows no direct access."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        file, is_direct = os.open(name, flags | direct), bool(direct)
    except OSError:
        file, is_direct = os.open(name, flags), False
    try:
        yield file, is_direct
    finally:
        os.close(file)


def _stream(move: Callable[[int], int], num_bytes: int, finish: Callable[[], None]) -> tuple[float, int]:
    """Bytes per second of moving up to `num_bytes` chunk by chunk, `finish` included; and how many were moved."""
    begin = time.perf_counter()
    moved = 0
    while moved < num_bytes and time.perf_counter() - begin < _DISK_LIMIT_S:
        moved += move(moved)
    finish()
    return moved / max(time.perf_counter() - begin, 1e-9), moved
