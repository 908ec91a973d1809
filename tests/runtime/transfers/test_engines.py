"""The engine contract on CPU: host and disk tiers by threads."""

from __future__ import annotations

import errno
import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers import ops
from fxmem.runtime.transfers.arena import host_bytes
from fxmem.runtime.transfers.disk_file import DiskFile
from fxmem.runtime.transfers.engine import Engine, Hook, Moment
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.runtime.transfers.threads import ThreadEngine, return_freed_memory
from fxmem.runtime.transfers.worker import Worker
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


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_random_programs_under_random_delays(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_random_programs(make, CPU, tiers, False, range(34))


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_steps_in_flight(make: contract.MakeEngine, tiers: tuple[Tier, ...]) -> None:
    contract.check_steps_in_flight(make, CPU, tiers, False)


@pytest.mark.slow
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


def _round_trip(engine: Engine, seed: int = 0) -> None:
    layout, calls = contract.random_program(3, ("host", "disk"))
    contract.Run(engine, layout, calls, CPU, seed).finish()


def test_arenas_that_only_a_burst_needed_are_given_back(make: contract.MakeEngine) -> None:
    layout, calls = contract.random_program(3, ("host", "disk"))
    engine = make(layout, None)
    runs = [contract.Run(engine, layout, calls, CPU, seed) for seed in range(3)]
    for run in runs:
        run.advance()
    for run in runs:
        run.finish()
    _round_trip(engine)
    assert engine.levels().num_arenas == 3, "the next burst may come soon"
    for _ in range(20):
        _round_trip(engine)
    levels = engine.levels()
    assert (levels.num_arenas, levels.host_bytes, levels.disk_bytes) == (1, layout.host_bytes, layout.disk_bytes)
    assert engine.num_allocations == 3
    engine.close()


def test_a_retired_engine_keeps_only_steps_in_flight(make: contract.MakeEngine) -> None:
    layout, calls = contract.random_program(3, ("host", "disk"))
    engine = make(layout, None)
    _round_trip(engine)
    run = contract.Run(engine, layout, calls, CPU, seed=1)
    run.advance()
    _round_trip(engine)
    assert engine.levels().num_arenas == 2
    engine.retire()
    assert engine.levels().num_arenas == 1
    run.finish()
    assert engine.levels().num_arenas == 0
    _round_trip(engine)  # a late call of the old code still works
    assert engine.levels().num_arenas == 0


def test_an_abandoned_step_gives_device_bytes_back_at_once(make: contract.MakeEngine) -> None:
    engine = make(lay_out([Slot(0, 4096, "host", 0, 1)]), None)
    step, x = engine.begin(), torch.zeros(4096, dtype=torch.uint8)
    held = weakref.ref(x)
    engine.offload(step, 0, x)
    engine._jobs[1, 0, -1].join()  # type: ignore[attr-defined]
    del x
    assert held() is not None
    del step
    assert held() is None, "it waited for the next step"
    engine.close()


def test_an_engine_whose_owner_dies_on_a_copying_thread_is_closed(make: contract.MakeEngine) -> None:
    """A collection may run anywhere; closing waits for the copying threads, one of which this is."""
    engine = make(lay_out([Slot(0, 4096, "host", 0, 1)]), None)
    key = ops.register(engine)
    step = engine.begin()
    engine.offload(step, 0, torch.zeros(4096, dtype=torch.uint8))
    engine._out.submit(lambda: ops.release(key)).finish()  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if thread.name == "fxmem-close":
            thread.join()
    assert engine.levels().host_bytes == 0
    with pytest.raises(OffloadError, match="closed"):
        engine.begin()


def test_a_worker_starts_again_after_close() -> None:
    worker, seen = Worker("test"), list[int]()
    for number in range(2):
        worker.submit(lambda number=number: seen.append(number)).finish()  # type: ignore[misc]
        worker.close()
    assert seen == [0, 1]


def _in_child(check: Callable[[], None]) -> int:
    """Exit status of a forked child that runs `check`, which must end within 60 s."""
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.distributed
@pytest.mark.skipif(torch.version.cuda is not None, reason="builds with CUDA can't fork")
def test_a_forked_child_has_workers_and_arenas_of_its_own(make: contract.MakeEngine, tmp_path: Path) -> None:
    layout, calls = contract.random_program(3, ("host", "disk"))
    engine = make(layout, None)
    _round_trip(engine)
    mine = contract.Run(engine, layout, calls, CPU, seed=1)
    for _ in range(len(calls) // 2):
        mine.advance()

    def check() -> None:
        for seed in range(3):
            _round_trip(engine, seed)
        with pytest.raises(OffloadError, match="before a fork"):
            mine.advance()
        engine.close()

    assert _in_child(check) == 0
    mine.finish()  # nothing of it was touched
    engine.close()
