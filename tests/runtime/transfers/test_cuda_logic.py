"""CudaEngine's bookkeeping without a card: streams that run at once, on CPU tensors.

This checks arenas, staging, disk jobs, errors and lifetimes. What order real streams run in is checked under tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu_offload import run, timed
from fxmem.errors import OffloadError
from fxmem.runtime.transfers import arena, cuda
from fxmem.runtime.transfers.disk_file import DiskFile
from fxmem.runtime.transfers.engine import Engine, Hook, Moment
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.schedule.actions import Tier
from tests.runtime.transfers import contract

CPU = torch.device("cpu")
TIERS: list[tuple[Tier, ...]] = [("host",), ("disk",), ("host", "disk")]


class _Event:
    def __init__(self, enable_timing: bool = False) -> None: ...
    def elapsed_time(self, end: _Event) -> float:
        return 1.0

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class _Stream:
    def __init__(self, device: Any = None) -> None: ...
    def record_event(self) -> _Event:
        return _Event()

    def wait_event(self, event: _Event) -> None:
        assert isinstance(event, _Event)

    def wait_stream(self, stream: _Stream) -> None: ...


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[contract.MakeEngine]:
    computing = _Stream()
    pinned: list[int] = []

    def pin(host: Any, device: torch.device) -> Any:
        pinned.append(host.nbytes)
        return lambda: pinned.remove(host.nbytes)

    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(arena, "pin", pin)

    def build(layout: Layout, hook: Hook | None) -> Engine:
        return cuda.CudaEngine(layout, CPU, DiskFile(tmp_path), hook)

    yield build
    assert pinned == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_random_programs(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_random_programs(make, CPU, tiers, True, range(10))


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_steps_in_flight(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_steps_in_flight(make, CPU, tiers, True)


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_abandoned_steps(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_abandoned_steps(make, CPU, tiers, True)


@pytest.mark.parametrize("moment", ["out", "in", "arena"])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_failures_end_one_step(make: contract.MakeEngine, tiers: tuple[Tier, ...], moment: Moment) -> None:
    contract.check_failures(make, CPU, tiers, True, moment)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_second_backward(make: contract.MakeEngine, tier: Tier) -> None:
    contract.check_second_backward(make, CPU, tier, True)


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_timed_engine_counts_every_copy_and_wait(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    """What bench.gpu_offload measures: a pair of events around each copy, and around each wait for one."""
    with timed() as timing:
        contract.check_steps_in_flight(make, CPU, tiers, True)
        timing.seconds()
        layout, calls = contract.random_program(3, tiers, True)
        engine = make(layout, None)
        contract.Run(engine, layout, calls, CPU, seed=0).finish()
        verbs = [verb for verb, _ in calls]
        assert len(timing.copies) == verbs.count("offload") + verbs.count("reload")
        assert len(timing.waits) == verbs.count("free") + verbs.count("wait")
        copy_s, stall_s = timing.seconds()
        assert (copy_s, stall_s) == (len(calls) / 2e3, len(calls) / 2e3)
        assert timing.seconds() == (0.0, 0.0)
        engine.close()


def test_a_captured_cuda_graph_is_refused(make: contract.MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(Layout(), None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(OffloadError, match="CUDA graph"):
        engine.begin()
    engine.close()


def test_failed_page_locking_leaves_no_error_for_the_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[str] = []

    class Runtime:
        def cudaHostRegister(self, *_: Any) -> int:  # noqa: N802
            last.append("out of memory")
            return 2

    def launch(*_: Any, device: torch.device) -> None:
        if last:
            raise RuntimeError(last.pop())

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch, "zeros", launch)
    with pytest.raises(OffloadError, match="refused"):
        arena.open_arena(lay_out([Slot(0, 4096, "host", 0, 1)]), None, torch.device("cuda"))
    assert last == []


@pytest.mark.slow
def test_bench_row(tmp_path: Path) -> None:
    row = run("gpt2", "tiny", "host", 0.8, CPU, tmp_path)
    assert row["measured_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]
    assert row["same_gradients"]
    assert (row["copy_s"], row["stall_s"], row["hidden_pct"]) == (0.0, 0.0, 0.0)
