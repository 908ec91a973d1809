"""What every engine must do, whatever the device: run by the CPU tests and, on a CUDA card, by tests/gpu."""

from __future__ import annotations

import errno
import gc
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.engine import Engine, Hook, Moment, Step
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.schedule.actions import Tier

MakeEngine = Callable[[Layout, Hook | None], Engine]
Verb = Literal["offload", "free", "reload", "wait"]
Call = tuple[Verb, int]


@dataclass
class Faults:
    """A hook that sleeps for random times up to `delay_s` and raises `errors[moment]` once each is due."""

    seed: int = 0
    delay_s: float = 0.0
    errors: dict[Moment, Exception] = field(default_factory=dict)
    calls: Counter[Moment] = field(default_factory=Counter)

    def __call__(self, moment: Moment, slot: int) -> None:
        self.calls[moment] += 1
        if self.delay_s:
            time.sleep(random.Random(f"{self.seed} {moment} {slot}").random() * self.delay_s)
        if moment in self.errors:
            raise self.errors.pop(moment)


def random_program(
    seed: int, tiers: tuple[Tier, ...], staged: bool = False, num_slots: int = 8
) -> tuple[Layout, list[Call]]:
    """Slots of random sizes, and valid operations on them in random order: places on the tiers are used again."""
    rng = random.Random(seed)
    calls: list[Call] = []
    todo: list[list[Call]] = []
    for slot in range(num_slots):
        reloads: list[Call] = [("reload", slot), ("wait", slot)]
        todo.append([("offload", slot), ("free", slot), *reloads * rng.choice((1, 1, 2))])
    started = 0
    while any(todo):
        ready = [slot for slot in range(num_slots) if todo[slot] and slot <= started]
        slot = rng.choice(ready)
        if todo[slot][0][0] == "offload":
            started += 1
        calls.append(todo[slot].pop(0))
    sizes = [rng.choice((0, 1, 100, 4096, 5000, 1 << 16, 300_001)) for _ in range(num_slots)]
    return lay_out([_slot(calls, slot, sizes[slot], rng.choice(tiers)) for slot in range(num_slots)], staged), calls


def _slot(calls: list[Call], slot: int, nbytes: int, tier: Tier) -> Slot:
    at = {
        verb: [i for i, call in enumerate(calls) if call == (verb, slot)]
        for verb in ("offload", "free", "reload", "wait")
    }
    first, last = at["offload"][0], at["wait"][-1]
    stages = ((first, at["free"][0]), *zip(at["reload"], at["wait"], strict=True))
    return Slot(slot, nbytes, tier, first, last, stages)


@dataclass
class Run:
    """One step of a random program: does the calls one by one, keeps what the device should hold."""

    engine: Engine
    layout: Layout
    calls: list[Call]
    device: torch.device
    seed: int
    step: Step | None = None
    position: int = 0
    standing_bytes: int = 0
    targets: dict[int, torch.Tensor] = field(default_factory=dict)

    def value(self, slot: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + slot)
        return torch.randint(0, 256, (self.layout.slots[slot].nbytes,), generator=generator, dtype=torch.uint8)

    def advance(self) -> None:
        """The next call; checks what came back."""
        self.step = self.step or self.engine.begin()
        verb, slot = self.calls[self.position]
        nbytes = self.layout.slots[slot].nbytes
        self.position += 1
        if verb == "offload":
            self.engine.offload(self.step, slot, self.value(slot).to(self.device))
            self.standing_bytes += nbytes
        elif verb == "free":
            self.engine.free(self.step, slot)
            self.standing_bytes -= nbytes
        elif verb == "reload":
            self.targets[slot] = self.engine.reload(self.step, slot)
            self.standing_bytes += nbytes
        else:
            self.engine.wait(self.step, slot, self.targets[slot])
            self.standing_bytes -= nbytes
            assert torch.equal(self.targets.pop(slot).cpu(), self.value(slot)), f"slot {slot} came back changed"

    @property
    def is_over(self) -> bool:
        return self.position == len(self.calls)

    def finish(self) -> None:
        while not self.is_over:
            self.advance()
        self.step = None


def check_random_programs(
    make: MakeEngine, device: torch.device, tiers: tuple[Tier, ...], staged: bool, seeds: range
) -> None:
    """Values bitwise equal, device bytes at every point those of the program, room on the tiers that of the layout."""
    for seed in seeds:
        layout, calls = random_program(seed, tiers, staged)
        engine = make(layout, Faults(seed, delay_s=0.002))
        for repeat in range(2 if seed < 5 else 1):
            run = Run(engine, layout, calls, device, seed + repeat)
            while not run.is_over:
                run.advance()
                assert engine.levels().pending_device_bytes == run.standing_bytes
            run.finish()
        levels = engine.levels()
        assert levels.host_bytes == layout.host_bytes + layout.stage_bytes
        assert (levels.num_allocations, levels.num_steps, levels.disk_bytes) == (1, 0, layout.disk_bytes)
        engine.close()
        assert engine.levels().host_bytes == 0


def check_steps_in_flight(make: MakeEngine, device: torch.device, tiers: tuple[Tier, ...], staged: bool) -> None:
    """Interleaved steps don't touch one another; as many arenas as steps in flight, used again afterwards."""
    layout, calls = random_program(5, tiers, staged)
    engine = make(layout, Faults(5, delay_s=0.002))
    rng = random.Random(0)
    for _ in range(3):
        runs = [Run(engine, layout, calls, device, seed) for seed in range(3)]
        while any(not run.is_over for run in runs):
            rng.choice([run for run in runs if not run.is_over]).advance()
        for run in runs:
            run.finish()
    assert engine.levels().num_arenas == engine.num_allocations == 3
    engine.close()


def check_abandoned_steps(make: MakeEngine, device: torch.device, tiers: tuple[Tier, ...], staged: bool) -> None:
    """A step dropped at any point leaves nothing behind, and its late copies don't touch the next step."""
    layout, calls = random_program(7, tiers, staged)
    engine = make(layout, Faults(7, delay_s=0.003))
    for stop in range(len(calls)):
        dropped = Run(engine, layout, calls, device, seed=stop)
        for _ in range(stop):
            dropped.advance()
        del dropped
        Run(engine, layout, calls, device, seed=stop + 1).finish()
        levels = engine.levels()
        assert (levels.num_steps, levels.pending_device_bytes, levels.num_arenas) == (0, 0, 1)
    engine.close()


def check_failures(
    make: MakeEngine, device: torch.device, tiers: tuple[Tier, ...], staged: bool, moment: Moment
) -> None:
    """A failed copy is an OffloadError, once and for the whole step; the next step works."""
    layout, calls = random_program(11, tiers, staged)
    faults = Faults()
    engine = make(layout, faults)
    Run(engine, layout, calls, device, seed=0).finish()
    before = engine.levels()
    faults.errors[moment] = OSError(errno.EIO, "injected")
    failed = Run(engine, layout, calls, device, seed=1)
    if moment == "arena":
        first = Run(engine, layout, calls, device, seed=2)
        first.advance()  # takes the only arena
        with pytest.raises((OffloadError, OSError)):
            failed.finish()
        first.finish()
        del first
    else:
        with pytest.raises(OffloadError, match="injected"):
            failed.finish()
        levels = engine.levels()
        assert levels.pending_device_bytes == 0, "a failed step holds on to device bytes"
        Run(engine, layout, calls, device, seed=2).finish()  # while the failed one still has handles
        assert engine.num_allocations == 1
        with pytest.raises(OffloadError, match="injected"):
            failed.finish()
    failed.step = None
    gc.collect()  # the exceptions' tracebacks
    Run(engine, layout, calls, device, seed=3).finish()
    after = engine.levels()
    assert (after.num_steps, after.host_bytes, after.disk_bytes) == (0, before.host_bytes, before.disk_bytes)
    engine.close()


def check_second_backward(make: MakeEngine, device: torch.device, tier: Tier, staged: bool) -> None:
    """A slot can be reloaded again as long as no other took its place; then there is an error, never wrong bytes."""
    slots = [Slot(0, 5000, tier, 0, 3, ((0, 1), (2, 3))), Slot(1, 5000, tier, 4, 7, ((4, 5), (6, 7)))]
    layout = lay_out(slots, staged)
    assert layout.slots[0].offset == layout.slots[1].offset
    engine = make(layout, None)
    calls: list[Call] = [(verb, slot) for slot in (0, 1) for verb in ("offload", "free", "reload", "wait")]  # type: ignore[misc]
    run = Run(engine, layout, [*calls[:4], *calls[2:4], *calls[4:], *calls[2:4]], device, seed=0)
    for _ in range(10):
        run.advance()
    with pytest.raises(OffloadError, match="retain_graph"):
        run.advance()
    engine.close()


def check_growing_slot(make: MakeEngine, device: torch.device, tier: Tier) -> None:
    """Symbolic shapes: a slot that outgrows its place gets one of its own, the arena fits it from the next step on."""
    layout = lay_out(
        [Slot(0, 100, tier, 0, 3, ((0, 1), (2, 3))), Slot(1, 64, tier, 0, 3, ((0, 1), (2, 3)))],
        staged=device.type == "cuda",
    )
    engine = make(layout, None)
    small = torch.arange(64, dtype=torch.uint8, device=device)
    for nbytes in (100, 10_000, 10_000, 50, 10_000):
        step = engine.begin()
        x = torch.arange(nbytes, device=device).to(torch.uint8)
        for slot, source in ((0, x), (1, small)):
            engine.offload(step, slot, source)
            engine.free(step, slot)
        for slot, source in ((0, x), (1, small)):
            back = engine.reload(step, slot)
            engine.wait(step, slot, back)
            assert torch.equal(back, source)
        del step
    assert engine.levels().num_arenas == 1
    assert engine.num_allocations == 3  # 100 bytes, the spill, 10,000 bytes
    engine.close()
