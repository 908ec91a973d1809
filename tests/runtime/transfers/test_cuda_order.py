"""CudaEngine: every two accesses to one byte are ordered, on random layouts and orders (see `happens_before`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fxmem.runtime.transfers import cuda
from fxmem.runtime.transfers.engine import Step
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.schedule.actions import Tier
from tests.runtime.transfers import happens_before
from tests.runtime.transfers.contract import Call, random_program
from tests.runtime.transfers.happens_before import WATCH, Device, File, Race, Stream, Watched

CPU = torch.device("cpu")
TIERS: list[tuple[Tier, ...]] = [("host",), ("disk",), ("host", "disk")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return happens_before.install(monkeypatch)


class Run:
    """One step: calls of a program, between kernels that make, read and reuse the bytes."""

    def __init__(self, engine: Watched, layout: Layout, calls: list[Call], seed: int) -> None:
        self.engine, self.layout, self.calls, self.seed = engine, layout, list(calls), seed
        self.step: Step | None = None
        self.standing: dict[int, torch.Tensor] = {}

    def value(self, slot: int) -> torch.Tensor:
        return torch.full((self.layout.slots[slot].nbytes,), (self.seed * 31 + slot) % 256, dtype=torch.uint8)

    def advance(self) -> None:
        verb, slot = self.calls.pop(0)
        self.step = self.step or self.engine.begin()
        if verb == "offload":
            x = self.standing[slot] = self.value(slot)
            WATCH.compute(x, writes=True)
            self.engine.offload(self.step, slot, x)
        elif verb == "free":
            self.engine.free(self.step, slot)
            WATCH.compute(self.standing.pop(slot), writes=True)
        elif verb == "reload":
            self.standing[slot] = self.engine.reload(self.step, slot)
        else:
            back = self.standing.pop(slot)
            self.engine.wait(self.step, slot, back)
            WATCH.compute(back, writes=False)
            assert torch.equal(back, self.value(slot))
            WATCH.compute(back, writes=True)

    def drop(self) -> None:
        """Its handles die; what it held on the device is used again once the engine has let go of it."""
        self.step = None
        self.engine.collect()
        for tensor in self.standing.values():
            WATCH.compute(tensor, writes=True)
        self.standing.clear()


def check(folder: Path, device: Device, tiers: tuple[Tier, ...], seeds: range) -> None:
    """Steps in flight together, some dropped half way, on streams that change between steps."""
    for seed in seeds:
        rng = random.Random(seed)
        layout, calls = random_program(seed, tiers, staged=True)
        engine = Watched(layout, CPU, File(folder))
        for _ in range(3):
            runs = [Run(engine, layout, calls, rng.randrange(100)) for _ in range(rng.choice((1, 1, 2)))]
            limits = {id(run): rng.choice((0, 0, rng.randrange(len(calls)))) for run in runs}
            before, device.computing = device.computing, rng.choice((device.computing, Stream()))
            device.computing.wait_stream(before)
            while runs:
                run = rng.choice(runs)
                run.advance()
                if len(run.calls) <= limits[id(run)]:
                    run.drop()
                    runs.remove(run)
        engine.close()
        WATCH.forget()


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_random_programs(device: Device, tmp_path: Path, tiers: tuple[Tier, ...]) -> None:
    check(tmp_path, device, tiers, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_many_random_programs(device: Device, tmp_path: Path, tiers: tuple[Tier, ...]) -> None:
    check(tmp_path, device, tiers, range(40, 140))


def test_a_staging_place_that_is_taken_in_part(device: Device, tmp_path: Path) -> None:
    """A (300 KB) is on its way to disk when B comes back through its first bytes; C passes through the next ones."""
    sizes = (4096, 300_000, 4096)
    stages = (((0, 1), (4, 8)), ((2, 3), (9, 10)), ((5, 6), (11, 12)))
    first = ((0, 8), (2, 10), (5, 12))
    slots = [Slot(i, sizes[i], "disk", *first[i], stages[i]) for i in range(3)]
    layout = lay_out(slots, staged=True)
    assert layout.slots[0].stage_offsets[1] == layout.slots[1].stage_offsets[0] == 0
    assert 0 < layout.slots[2].stage_offsets[0] < sizes[1]
    calls: list[Call] = [("offload", 0), ("free", 0), ("offload", 1), ("free", 1), ("reload", 0), ("offload", 2)]
    calls += [("free", 2), ("wait", 0), ("reload", 1), ("wait", 1), ("reload", 2), ("wait", 2)]
    run = Run(Watched(layout, CPU, File(tmp_path)), layout, calls, 0)
    while run.calls:
        run.advance()
    run.engine.close()


def _nothing(*_: Any) -> None: ...


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "compute waits for no copy": lambda p: p.setattr(Watched, "_wait_for", _nothing),
    "copies wait for nothing": lambda p: p.setattr(Stream, "wait_event", _nothing),
    "staging is free at once": lambda p: p.setattr(cuda._Stages, "earlier", lambda *_: []),
    "staging is forgotten": lambda p: p.setattr(cuda, "_covers", cuda._overlap),
    "dropped steps are not waited for": lambda p: p.setattr(Watched, "_quiesce", _nothing),
    "disk writes wait for no copy": lambda p: p.setattr(happens_before.Event, "synchronize", _nothing),
    "reads wait for no write": lambda p: p.setattr(happens_before.Job, "finish", _nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_finds_a_missing_wait(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(Race):
        check(tmp_path, device, ("host", "disk"), range(200))
