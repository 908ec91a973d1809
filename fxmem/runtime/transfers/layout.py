"""Where offloaded storages lie on a tier: offsets fixed by the plan, so that nothing is allocated while a step runs."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fxmem.ir.program import Program
from fxmem.schedule.actions import Action, Free, Offload, Reload, Tier, Wait
from fxmem.units import align_up

ALIGNMENT_BYTES: dict[Tier, int] = {"host": 64, "disk": 4096}
"""Host: a cache line. Disk: the block size that unbuffered file access needs."""


class FreeList:
    """First-fit allocator of offsets in a growing range, with coalescing of free neighbours."""

    def __init__(self) -> None:
        self.end = 0
        self._holes: list[tuple[int, int]] = []  # (offset, bytes), by offset, never adjacent

    def allocate(self, nbytes: int) -> int:
        """Offset of `nbytes`; grows `end` when no hole is large enough."""
        for i, (offset, size) in enumerate(self._holes):
            if size >= nbytes:
                self._holes[i : i + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                return offset
        offset = self._holes.pop()[0] if self._holes and sum(self._holes[-1]) == self.end else self.end
        self.end = offset + nbytes
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        if nbytes:
            insort(self._holes, (offset, nbytes))
            merged: list[tuple[int, int]] = []
            for hole in self._holes:
                if merged and sum(merged[-1]) == hole[0]:
                    merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
                else:
                    merged.append(hole)
            self._holes = merged

    @property
    def used_bytes(self) -> int:
        return self.end - sum(size for _, size in self._holes)


@dataclass(frozen=True, slots=True)
class Slot:
    """One `Offload`: `storage`'s `nbytes` on `tier` from schedule step `first` to `last` (inclusive).

    `stages`: the periods (first, last step) in which the bytes also pass through pinned host memory (disk tier of
    a CUDA device): one for the way out, then one per reload. `offset` and `stage_offsets` are positions in the arenas.
    """

    storage: int
    nbytes: int
    tier: Tier
    first: int
    last: int
    stages: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    stage_offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Slots in schedule order (a slot's id is its position) and the bytes of one step's arenas.

    `stage_bytes` is the part of pinned host memory through which disk transfers of a CUDA device pass.
    """

    slots: tuple[Slot, ...] = ()
    host_bytes: int = 0
    disk_bytes: int = 0
    stage_bytes: int = 0
    staged: bool = field(default=False)

    def resized(self, sizes: Sequence[int]) -> Layout:
        """The same slots with other byte counts (symbolic shapes), laid out anew."""
        return lay_out((replace(s, nbytes=n) for s, n in zip(self.slots, sizes, strict=True)), self.staged)


def plan_layout(program: Program, actions: Sequence[Action], staged: bool = False) -> Layout:
    """Slots of every `Offload` in `actions`. `staged`: disk transfers pass through pinned host memory (CUDA)."""
    return lay_out(_slots(program, actions), staged)


def lay_out(slots: Iterable[Slot], staged: bool = False) -> Layout:
    """Assign offsets by first fit over the lifetimes, in schedule order."""
    placed = list(slots)
    totals: dict[Tier, int] = {}
    for tier, alignment in ALIGNMENT_BYTES.items():
        ids = [i for i, slot in enumerate(placed) if slot.tier == tier]
        sizes = [align_up(placed[i].nbytes, alignment) for i in ids]
        offsets, totals[tier] = pack([(placed[i].first, placed[i].last) for i in ids], sizes)
        for i, offset in zip(ids, offsets, strict=True):
            placed[i] = replace(placed[i], offset=offset)
    stage_bytes = _place_stages(placed) if staged else 0
    return Layout(tuple(placed), totals["host"], totals["disk"], stage_bytes, staged)


def _place_stages(placed: list[Slot]) -> int:
    """Staging offsets of disk slots, in place; returns the bytes of the staging area."""
    uses = [(i, period) for i, slot in enumerate(placed) if slot.tier == "disk" for period in slot.stages]
    sizes = [align_up(placed[i].nbytes, ALIGNMENT_BYTES["disk"]) for i, _ in uses]
    offsets, total = pack([period for _, period in uses], sizes)
    for i in {i for i, _ in uses}:
        mine = tuple(offset for offset, (owner, _) in zip(offsets, uses, strict=True) if owner == i)
        placed[i] = replace(placed[i], stage_offsets=mine)
    return total


def pack(periods: Sequence[tuple[int, int]], sizes: Sequence[int]) -> tuple[list[int], int]:
    """First fit: offsets of blocks of `sizes` bytes that live during `periods` (inclusive steps), and the total."""
    free_list = FreeList()
    offsets = [0] * len(sizes)
    active: list[tuple[int, int]] = []  # (last step, block)
    for block in sorted(range(len(sizes)), key=lambda b: (periods[b][0], b)):
        for last, other in [entry for entry in active if entry[0] < periods[block][0]]:
            free_list.release(offsets[other], sizes[other])
            active.remove((last, other))
        offsets[block] = free_list.allocate(sizes[block])
        active.append((periods[block][1], block))
    return offsets, free_list.end


def _slots(program: Program, actions: Sequence[Action]) -> list[Slot]:
    nbytes, end = program.nbytes(), len(actions)
    slots: list[Slot] = []
    newest: dict[int, int] = {}  # storage -> its present slot
    reload_step: dict[int, int] = {}
    for step, action in enumerate(actions):
        match action:
            case Offload(storage, tier):
                newest[storage] = len(slots)
                slots.append(Slot(storage, nbytes[storage], tier, step, end, ((step, end),)))
            case Free(storage) if storage in newest:
                slot = slots[newest[storage]]
                if len(slot.stages) == 1 and slot.stages[0][1] == end:
                    slots[newest[storage]] = replace(slot, stages=((slot.first, step),))
            case Reload(storage):
                reload_step[storage] = step
            case Wait(storage):
                slot = slots[newest[storage]]
                stages = (*slot.stages, (reload_step[storage], step))
                slots[newest[storage]] = replace(slot, last=step, stages=stages)
            case _:
                pass
    return slots
