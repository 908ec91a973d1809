"""Random offloads for engines that move bytes: valid orders of operations, and the bytes that must come back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from fxmem.runtime.transfers.engine import Engine, Hook, Moment
from fxmem.runtime.transfers.layout import ALIGNMENT_BYTES, Layout, Slot, lay_out
from fxmem.schedule.actions import Tier

Verb = Literal["offload", "free", "reload", "wait"]


@dataclass(frozen=True)
class Transfers:
    """`slots` (bytes and tiers, not laid out) and `calls` of an engine, in order: (verb, slot)."""

    slots: tuple[Slot, ...]
    calls: tuple[tuple[Verb, int], ...]


@st.composite
def transfers(draw: st.DrawFn, tiers: Sequence[Tier] = ("host",), num_slots: tuple[int, int] = (1, 6)) -> Transfers:
    """Slots of random sizes and valid operations on them in random order: each is offloaded, given up, and comes back
    once or twice, so that places on the tiers are used again."""
    todo: list[list[tuple[Verb, int]]] = []
    for slot in range(draw(st.integers(*num_slots))):
        back: list[tuple[Verb, int]] = [("reload", slot), ("wait", slot)]
        todo.append([("offload", slot), ("free", slot), *back * draw(st.sampled_from((1, 1, 2)))])
    calls: list[tuple[Verb, int]] = []
    started = 0
    while any(todo):
        slot = draw(st.sampled_from([s for s in range(len(todo)) if todo[s] and s <= started]))
        started += todo[slot][0][0] == "offload"
        calls.append(todo[slot].pop(0))
    sizes = [draw(st.sampled_from((64, 0, 1, 100, 4096, 5000))) for _ in todo]
    chosen = [draw(st.sampled_from(sorted(tiers, reverse=True))) for _ in todo]
    return Transfers(tuple(_slot(calls, s, sizes[s], chosen[s]) for s in range(len(todo))), tuple(calls))


def _slot(calls: list[tuple[Verb, int]], slot: int, nbytes: int, tier: Tier) -> Slot:
    def steps(verb: Verb) -> list[int]:
        return [step for step, call in enumerate(calls) if call == (verb, slot)]

    first, waits = steps("offload")[0], steps("wait")
    stages = ((first, steps("free")[0]), *zip(steps("reload"), waits, strict=True))
    return Slot(slot, nbytes, tier, first, waits[-1], stages)


def check_layout(layout: Layout) -> None:
    """Assert that no byte of a tier, or of the staging area, has two users at once, and that every place is inside its
    arena and aligned. Raises AssertionError naming the slots."""
    for tier, total in (("host", layout.host_bytes), ("disk", layout.disk_bytes)):
        mine = [(i, s) for i, s in enumerate(layout.slots) if s.tier == tier]
        places = [(i, s.offset, s.nbytes, (s.first, s.last)) for i, s in mine]
        _check_places(f"{tier} tier", places, total, ALIGNMENT_BYTES[tier])  # type: ignore[index]
    if layout.staged:
        staged = [(i, s) for i, s in enumerate(layout.slots) if s.tier == "disk"]
        assert all(len(s.stages) == len(s.stage_offsets) for _, s in staged), "a slot lacks a staging place"
        places = [
            (i, offset, s.nbytes, period)
            for i, s in staged
            for offset, period in zip(s.stage_offsets, s.stages, strict=True)
        ]
        _check_places("staging area", places, layout.stage_bytes, ALIGNMENT_BYTES["disk"])


def _check_places(
    where: str, places: list[tuple[int, int, int, tuple[int, int]]], total_bytes: int, alignment: int
) -> None:
    for slot, offset, nbytes, _ in places:
        assert 0 <= offset <= total_bytes - nbytes, f"slot {slot} lies outside the {where}"
        assert offset % alignment == 0, f"slot {slot} is not aligned in the {where}"
    for (one, at, nbytes, period), (other, start, size, times) in combinations(places, 2):
        overlap = nbytes and size and at < start + size and start < at + nbytes
        together = period[0] <= times[1] and times[0] <= period[1]
        assert not (overlap and together), (
            f"{where}: slots {one} and {other} use the same bytes between steps {max(period[0], times[0])} and "
            f"{min(period[1], times[1])}"
        )


def check_engine(
    make: Callable[[Layout, Hook | None], Engine],
    drawn: Transfers,
    *,
    device: str = "cpu",
    staged: bool = False,
    seed: int = 0,
    delay_s: float = 0.0005,
    lay: Callable[..., Layout] = lay_out,
) -> None:
    """Assert that an engine brings back every byte, whatever the delays, and gives everything back when it is closed.

    `make(layout, hook)`: the engine, whose hook sleeps up to `delay_s` before a copy. `lay`: what lays the slots out.
    Two steps are run, the second over the places of the first. Raises AssertionError.
    """
    layout = lay(drawn.slots, staged)
    check_layout(layout)
    rng = random.Random(seed)

    def sleep(moment: Moment, slot: int) -> None:
        time.sleep(rng.random() * delay_s)

    engine = make(layout, sleep)
    try:
        for number in range(2):
            _run_step(engine, drawn, device, seed + number)
    finally:
        engine.close()
    assert engine.levels().host_bytes == 0, "a closed engine keeps host memory"


def _run_step(engine: Engine, drawn: Transfers, device: str, seed: int) -> None:
    step = engine.begin()
    arriving: dict[int, Tensor] = {}
    for verb, slot in drawn.calls:
        value = _value(drawn, slot, seed)
        if verb == "offload":
            engine.offload(step, slot, value.to(device))
        elif verb == "free":
            engine.free(step, slot)
        elif verb == "reload":
            arriving[slot] = engine.reload(step, slot)
        else:
            back = arriving.pop(slot)
            engine.wait(step, slot, back)
            assert torch.equal(back.cpu(), value), f"slot {slot} came back with other bytes"


def _value(drawn: Transfers, slot: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + slot)
    return torch.randint(0, 256, (drawn.slots[slot].nbytes,), generator=generator, dtype=torch.uint8)
