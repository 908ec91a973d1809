"""A plan as a memory snapshot of PyTorch's: `torch.cuda._memory_viz` and pytorch.org/memory_viz show it.

The first device trace is what the plan foretells, in the order of its actions; the second one, if there is any, what
was measured. Addresses are made up: the first place that is free in one segment.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fxmem.ir.program import Op
from fxmem.planners.plan import Plan
from fxmem.report.names import short_path, split_source
from fxmem.schedule import Compute, Recompute

Frame = dict[str, Any]
Entry = dict[str, Any]
Events = Sequence[tuple[int, int]]
"""(address, bytes) in order: more than 0 taken, less than 0 given back."""
_ALIGNMENT = 512
_TRACE_BASE = 1 << 32


def write_snapshot(plan: Plan, path: Path, measured: Events = ()) -> None:
    """Pickle the snapshot of `plan` to `path`, the events of a measurement beside it."""
    heap = _Heap(0)
    for storage in plan.program.resident:
        op = plan.program.ops[plan.program.producer[storage]]
        heap.take(("resident", storage), plan.program.nbytes()[storage], _frames(op))
    heap.take(("beside",), plan.program.extra_resident_bytes, [_frame("beside the graph")])
    _play(plan, heap)
    heaps = [heap]
    if measured:
        heaps.append(_Heap(1))
        _replay(measured, heaps[1])
    snapshot = {
        "segments": [each.segment() for each in heaps],
        "device_traces": [each.entries() for each in heaps],
        "allocator_settings": {},
        "external_annotations": [],
    }
    path.write_bytes(pickle.dumps(snapshot))


def _play(plan: Plan, heap: _Heap) -> None:
    """Take and give back what the simulator says, action by action."""
    born: dict[int, list[tuple[int, int]]] = {}
    dead: dict[int, list[tuple[int, int]]] = {}
    nbytes = plan.program.nbytes()
    for number, (storage, first, last) in enumerate(plan.simulation.lifetimes):
        born.setdefault(first, []).append((number, storage))
        if last < len(plan.actions):
            dead.setdefault(last, []).append((number, storage))
    for step, action in enumerate(plan.actions):
        op = plan.program.ops[action.op] if isinstance(action, (Compute, Recompute)) else None
        for number, storage in born.get(step, ()):
            made = op or plan.program.ops[plan.program.producer[storage]]
            heap.take(number, nbytes[storage], _frames(made, str(action)))
        if op is not None and op.workspace_bytes:
            heap.take("workspace", op.workspace_bytes, _frames(op, "workspace"))
            heap.give("workspace")
        for number, _ in dead.get(step, ()):
            heap.give(number)


def _replay(measured: Events, heap: _Heap) -> None:
    for address, nbytes in measured:
        if nbytes > 0:
            heap.give(address)  # its release was not seen
            heap.take(address, nbytes, [_frame("measured")])
        else:
            heap.give(address)


def _frames(op: Op, what: str = "") -> list[Frame]:
    """The op, its module, and the line of the model; innermost first, as the visualiser takes them."""
    file, line, _ = split_source(op.source)
    names = [f"{op.shown} {op.target} {what}".strip(), *([op.module] if op.module else [])]
    return [_frame(name, short_path(file) if file else "", line) for name in names]


def _frame(name: str, filename: str = "", line: int = 0) -> Frame:
    return {"filename": filename, "line": line, "name": name}


@dataclass
class _Place:
    address: int
    nbytes: int
    frames: list[Frame]

    @property
    def end(self) -> int:
        return self.address + -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Heap:
    """One device's memory: places by key, and the log of what was done."""

    device: int
    log: list[Entry] = field(default_factory=list)
    standing: dict[Any, _Place] = field(default_factory=dict)
    top: int = 0

    @property
    def base(self) -> int:
        return _TRACE_BASE * (self.device + 1)

    def take(self, key: Any, nbytes: int, frames: list[Frame]) -> None:
        if not nbytes:
            return
        place = _Place(self._free(nbytes), nbytes, frames)
        self.standing[key] = place
        self.top = max(self.top, place.end)
        self._note("alloc", place)

    def give(self, key: Any) -> None:
        place = self.standing.pop(key, None)
        if place is not None:
            self._note("free_requested", place)
            self._note("free_completed", place)

    def _free(self, nbytes: int) -> int:
        at = 0
        for place in sorted(self.standing.values(), key=lambda place: place.address):
            if place.address - at >= nbytes:
                break
            at = max(at, place.end)
        return at

    def _note(self, action: str, place: _Place) -> None:
        self.log.append(self._entry(action, place.address, place.nbytes, place.frames, len(self.log) + 1))

    def _entry(self, action: str, address: int, nbytes: int, frames: list[Frame], time_us: int) -> Entry:
        return {
            "action": action, "addr": self.base + address, "size": nbytes, "stream": 0, "time_us": time_us,
            "frames": frames,
        }  # fmt: skip

    def entries(self) -> list[Entry]:
        return [self._entry("segment_alloc", 0, self.top, [], 0), *self.log]

    def segment(self) -> dict[str, Any]:
        active = sum(place.nbytes for place in self.standing.values())
        return {
            "device": self.device, "address": self.base, "total_size": self.top, "stream": 0, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "allocated_size": active, "active_size": active,
            "requested_size": active, "frames": [], "blocks": list(self._blocks()),
        }  # fmt: skip

    def _blocks(self) -> Iterator[dict[str, Any]]:
        at = 0
        for place in sorted(self.standing.values(), key=lambda place: place.address):
            if place.address > at:
                yield self._block(at, place.address - at, 0, "inactive", [])
            yield self._block(place.address, place.end - place.address, place.nbytes, "active_allocated", place.frames)
            at = place.end
        if at < self.top:
            yield self._block(at, self.top - at, 0, "inactive", [])

    def _block(self, at: int, size: int, requested: int, state: str, frames: list[Frame]) -> dict[str, Any]:
        place = {"address": self.base + at, "size": size, "requested_size": requested, "state": state}
        return {**place, "frames": frames}
