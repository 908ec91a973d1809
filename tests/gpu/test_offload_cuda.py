"""The engine contract on a CUDA card, and what only streams can get wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.disk_file import DiskFile
from fxmem.runtime.transfers.engine import Engine, Hook, Moment
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.schedule.actions import Tier
from tests.runtime.transfers import contract

pytestmark = pytest.mark.gpu
TIERS: list[tuple[Tier, ...]] = [("host",), ("disk",), ("host", "disk")]
CYCLES = 20_000_000
"""About 10 ms of a busy stream."""


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def make(tmp_path: Path, cuda: torch.device) -> Iterator[contract.MakeEngine]:
    from fxmem.runtime.transfers.cuda import CudaEngine

    def build(layout: Layout, hook: Hook | None) -> Engine:
        return CudaEngine(layout, cuda, DiskFile(tmp_path), hook)

    yield build
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_random_programs_under_random_delays(
    make: contract.MakeEngine, cuda: torch.device, tiers: tuple[Tier, ...]
) -> None:
    contract.check_random_programs(make, cuda, tiers, True, range(34))


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_steps_in_flight(make: contract.MakeEngine, cuda: torch.device, tiers: tuple[Tier, ...]) -> None:
    contract.check_steps_in_flight(make, cuda, tiers, True)


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_abandoned_steps(make: contract.MakeEngine, cuda: torch.device, tiers: tuple[Tier, ...]) -> None:
    contract.check_abandoned_steps(make, cuda, tiers, True)


@pytest.mark.parametrize("moment", ["out", "in", "arena"])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_failures_end_one_step(
    make: contract.MakeEngine, cuda: torch.device, tiers: tuple[Tier, ...], moment: Moment
) -> None:
    contract.check_failures(make, cuda, tiers, True, moment)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_second_backward(make: contract.MakeEngine, cuda: torch.device, tier: Tier) -> None:
    contract.check_second_backward(make, cuda, tier, True)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_growing_slot(make: contract.MakeEngine, cuda: torch.device, tier: Tier) -> None:
    contract.check_growing_slot(make, cuda, tier)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_busy_copy_streams(make: contract.MakeEngine, cuda: torch.device, tier: Tier) -> None:
    """Both copy streams lag behind: blocks that were given up are used again at once, and nothing is stale."""

    def lag(moment: Moment, slot: int) -> None:
        if moment != "arena":
            torch.cuda._sleep(CYCLES)

    size = 1 << 20
    slots = [Slot(i, size, tier, 0, 9, ((0, 3), (4, 9))) for i in range(4)]
    engine = make(lay_out(slots, staged=True), lag)
    for repeat in range(3):
        step = engine.begin()
        for slot in range(4):
            x = torch.full((size,), 16 * repeat + slot, dtype=torch.uint8, device=cuda)
            engine.offload(step, slot, x)
            del x
            engine.free(step, slot)
            torch.full((size,), 255, dtype=torch.uint8, device=cuda)  # likely the same block
        backs = [engine.reload(step, slot) for slot in range(4)]
        for slot, back in enumerate(backs):
            engine.wait(step, slot, back)
            assert bool((back == 16 * repeat + slot).all())
        del step
    engine.close()


def test_current_stream_changes_between_steps(make: contract.MakeEngine, cuda: torch.device) -> None:
    """The stream that computes is read at every call: a slow producer on a new stream is still waited for."""
    size = 1 << 20
    engine = make(lay_out([Slot(0, size, "host", 0, 1)]), None)
    for number, stream in enumerate(
        (torch.cuda.current_stream(cuda), torch.cuda.Stream(cuda), torch.cuda.Stream(cuda))
    ):
        with torch.cuda.stream(stream):
            step = engine.begin()
            x = torch.zeros(size, dtype=torch.uint8, device=cuda)
            torch.cuda._sleep(CYCLES)
            x.add_(number + 1)
            engine.offload(step, 0, x)
            engine.free(step, 0)
            back = engine.reload(step, 0)
            engine.wait(step, 0, back)
            assert bool((back == number + 1).all())
            del step
    engine.close()


def test_allocated_bytes_fall_at_free(make: contract.MakeEngine, cuda: torch.device) -> None:
    size = 64 << 20
    engine = make(lay_out([Slot(0, size, "host", 0, 1)]), None)
    x = torch.zeros(size, dtype=torch.uint8, device=cuda)
    step, before = engine.begin(), torch.cuda.memory_allocated(cuda)
    engine.offload(step, 0, x)
    del x
    assert torch.cuda.memory_allocated(cuda) == before
    engine.free(step, 0)
    assert torch.cuda.memory_allocated(cuda) == before - size
    back = engine.reload(step, 0)
    assert torch.cuda.memory_allocated(cuda) == before
    engine.wait(step, 0, back)
    engine.close()


def test_copies_hide_under_compute(make: contract.MakeEngine, cuda: torch.device) -> None:
    """By events: while the computing stream is busy, copies out and back are done before it is."""
    size = 16 << 20
    engine = make(lay_out([Slot(0, size, "host", 0, 1)]), None)
    step, x = engine.begin(), torch.ones(size, dtype=torch.uint8, device=cuda)
    computing = torch.cuda.current_stream(cuda)
    engine.offload(step, 0, x)
    torch.cuda._sleep(20 * CYCLES)
    busy = computing.record_event()
    while not (copied := engine.d2h.query()) and not busy.query():  # type: ignore[attr-defined]
        pass
    assert copied
    assert not busy.query(), "the copy out waited for compute that came after it"
    engine.free(step, 0)
    back = engine.reload(step, 0)
    torch.cuda._sleep(20 * CYCLES)
    after = computing.record_event()
    while not (copied := engine.h2d.query()) and not after.query():  # type: ignore[attr-defined]
        pass
    assert copied
    assert not after.query(), "the copy back waited for compute that came after it"
    engine.wait(step, 0, back)
    assert bool((back == 1).all())
    engine.close()


def test_host_memory_refused(make: contract.MakeEngine) -> None:
    engine = make(lay_out([Slot(0, 1 << 60, "host", 0, 1)]), None)
    with pytest.raises(OffloadError, match="refused"):
        engine.begin()
    engine.close()
