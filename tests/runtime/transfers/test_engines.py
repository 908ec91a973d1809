"""The engine contract on CPU: host and disk tiers by threads."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.arena import host_bytes
from fxmem.runtime.transfers.disk_file import DiskFile
from fxmem.runtime.transfers.engine import Engine, Hook, Moment
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.runtime.transfers.threads import ThreadEngine, return_freed_memory
from fxmem.schedule.actions import Tier
from tests.runtime.transfers import contract

CPU = torch.device("cpu")
TIERS: list[tuple[Tier, ...]] = [("host",), ("disk",), ("host", "disk")]


@pytest.fixture
def make(tmp_path: Path) -> contract.MakeEngine:
    def build(layout: Layout, hook: Hook | None) -> Engine:
        return ThreadEngine(layout, DiskFile(tmp_path), hook)

    return build


@pytest.fixture(autouse=True)
def _no_file_left(tmp_path: Path):  # type: ignore[no-untyped-def]
    yield
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_random_programs_under_random_delays(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_random_programs(make, CPU, tiers, False, range(34))


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_steps_in_flight(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_steps_in_flight(make, CPU, tiers, False)


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_abandoned_steps(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_abandoned_steps(make, CPU, tiers, False)


@pytest.mark.parametrize("moment", ["out", "in", "arena"])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_failures_end_one_step(make: contract.MakeEngine, tiers: tuple[Tier, ...], moment: Moment) -> None:
    contract.check_failures(make, CPU, tiers, False, moment)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_second_backward(make: contract.MakeEngine, tier: Tier) -> None:
    contract.check_second_backward(make, CPU, tier, False)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_growing_slot(make: contract.MakeEngine, tier: Tier) -> None:
    contract.check_growing_slot(make, CPU, tier)


def test_misuse_is_named(make: contract.MakeEngine) -> None:
    engine = make(lay_out([Slot(0, 8, "host", 0, 3)]), None)
    with pytest.raises(OffloadError, match="never offloaded"):
        engine.reload(engine.begin(), 0)
    step = engine.begin()
    engine.offload(step, 0, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(OffloadError, match="before its bytes were given up"):
        engine.reload(step, 0)
    step = engine.begin()
    engine.offload(step, 0, torch.zeros(8, dtype=torch.uint8))
    engine.free(step, 0)
    engine.free(step, 0)  # a second backward through a saved tensor
    engine.reload(step, 0)
    with pytest.raises(OffloadError, match="no reload is filling"):
        engine.wait(step, 0, torch.zeros(8, dtype=torch.uint8))
    engine.close()
    with pytest.raises(OffloadError, match="closed"):
        engine.begin()


def test_host_memory_refused() -> None:
    with pytest.raises(OffloadError, match=r"host memory were refused .*tiers='disk'"):
        host_bytes(1 << 60)
    engine = ThreadEngine(lay_out([Slot(0, 1 << 60, "host", 0, 1)]))
    for _ in range(2):
        with pytest.raises(OffloadError, match="refused"):
            engine.begin()
    assert engine.levels().num_steps == 0


def test_disk_offload_gives_memory_back(make: contract.MakeEngine) -> None:
    if not return_freed_memory():
        pytest.skip("only glibc can be told to return memory")
    num, nbytes = 16, 4 << 20
    engine = make(lay_out([Slot(i, nbytes, "disk", 0, 1) for i in range(num)]), None)
    tensors = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(num)]
    step, before = engine.begin(), _resident_bytes()
    for i in range(num):
        engine.offload(step, i, tensors[i])
    for i in range(num):
        engine.free(step, i)
    tensors.clear()
    given_back = before - _resident_bytes()
    assert given_back > 0.8 * num * nbytes - (16 << 20)  # the copying thread holds a buffer
    for i in range(num):
        back = engine.reload(step, i)
        engine.wait(step, i, back)
        assert int(back.min()) == int(back.max()) == i
    engine.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_disk_full_at_begin(tmp_path: Path) -> None:
    class Full:
        is_full = True

        def __getattr__(self, name: str) -> object:
            import os

            return getattr(os, name)

        def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")

    calls = Full()
    engine = ThreadEngine(lay_out([Slot(0, 8, "disk", 0, 1)]), DiskFile(tmp_path, calls))  # type: ignore[arg-type]
    with pytest.raises(OffloadError, match=r"No space left.*offload_dir"):
        engine.begin()
    assert list(tmp_path.iterdir()) == []
    calls.is_full = False
    engine.begin()
    engine.close()
