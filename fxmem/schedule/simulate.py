"""The reference simulator: an action list on a machine -> bytes at every step, seconds, validity.

Memory follows program points only (never timing): storages are charged when their op runs or their reload is issued,
and returned after their last read or at `Free`. Time is event-driven over in-order streams: compute, and per tier one
out and one in stream (full duplex).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fxmem.errors import VerifyError
from fxmem.ir.program import Program
from fxmem.schedule.actions import Action, Compute, Free, Offload, Recompute, Reload, StartBackward, Tier, Wait


@dataclass(frozen=True, slots=True)
class Link:
    """One tier's connection, each direction in order: seconds = latency + bytes / bandwidth."""

    out_bytes_per_s: float
    in_bytes_per_s: float
    latency_s: float = 0.0

    def seconds(self, nbytes: int, out: bool) -> float:
        return self.latency_s + nbytes / (self.out_bytes_per_s if out else self.in_bytes_per_s)


@dataclass(frozen=True)
class Machine:
    """The device's links, by tier. Without a tier's link, offloading to it is invalid.

    `capacity_bytes`: what a tier may hold at once; without an entry there is no limit.
    """

    links: Mapping[Tier, Link] = field(default_factory=dict)
    capacity_bytes: Mapping[Tier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on a stream: `[start_s, end_s)` for action number `step`."""

    stream: str
    start_s: float
    end_s: float
    step: int


@dataclass(frozen=True)
class SimResult:
    """What an action list does.

    `bytes_at[i]`: device bytes standing while action i runs, workspace included. `peak_step`: first action at the peak.
    `seconds`: makespan; `compute_s` of it computing, of which `recompute_s` again; `stall_s` = waiting for copies.
    `tier_peak_bytes`: most bytes held at once on each tier. `lifetimes`: (storage, first step, last step) of every
    residency, both ends inclusive; the last step is len(actions) for what is never given back.
    """

    peak_bytes: int
    peak_step: int
    bytes_at: npt.NDArray[np.int64]
    seconds: float
    compute_s: float
    recompute_s: float
    tier_peak_bytes: Mapping[Tier, int]
    bytes_moved: int
    spans: Sequence[Span]
    lifetimes: Sequence[tuple[int, int, int]]

    @property
    def stall_s(self) -> float:
        return self.seconds - self.compute_s


def simulate(program: Program, actions: Sequence[Action], machine: Machine | None = None) -> SimResult:
    """Run `actions`. Raises VerifyError, naming the action, when they are not a valid schedule of `program`."""
    lifetimes = _lifetimes(program, actions)
    memory = _bytes_at(program, actions, lifetimes)
    clock = _Clock(program, machine or Machine())
    for step, action in enumerate(actions):
        clock.play(step, action)
    peak_step = int(memory.argmax()) if len(memory) else 0
    return SimResult(
        peak_bytes=int(memory.max(initial=resident_bytes(program))),
        peak_step=peak_step,
        bytes_at=memory,
        seconds=max([clock.now, *(end for end in clock.streams.values())]),
        compute_s=clock.compute_s,
        recompute_s=clock.recompute_s,
        tier_peak_bytes=_tier_peak_bytes(program, actions),
        bytes_moved=clock.bytes_moved,
        spans=clock.spans,
        lifetimes=lifetimes,
    )


def resident_bytes(program: Program) -> int:
    """Bytes on the device throughout: forward inputs and what stands beside them."""
    nbytes = program.nbytes()
    return program.extra_resident_bytes + sum(nbytes[s] for s in program.resident)


def reads_of(program: Program, action: Action) -> Iterable[int]:
    """Storages whose device bytes must hold their value when `action` runs."""
    match action:
        case Compute(op) if (state := program.state_op(program.ops[op])) is not None:
            return tuple(s for s in program.reads(program.ops[op]) if s not in state.storages)
        case Compute(op) | Recompute(op):
            return (*program.reads(program.ops[op]), *program.ops[op].mutates)
        case Offload(storage):
            return (storage,)
        case _:
            return ()


def without_unread_states(program: Program, actions: Sequence[Action]) -> tuple[Action, ...]:
    """`actions` without reading those states of generators that no second run of a random op asks for."""
    if not program.states:
        return tuple(actions)
    read = {storage for action in actions for storage in reads_of(program, action)}
    unread = {index for index in program.states if read.isdisjoint(program.ops[index].storages)}
    return tuple(a for a in actions if not (isinstance(a, Compute) and a.op in unread))


def writes_of(program: Program, action: Action) -> Iterable[int]:
    """Storages that `action` starts a new residency of."""
    match action:
        case Compute(op) | Recompute(op):
            return program.allocates(program.ops[op])
        case Reload(storage):
            return (storage,)
        case _:
            return ()


def _lifetimes(program: Program, actions: Sequence[Action]) -> list[tuple[int, int, int]]:
    """Residencies by one forward walk; checks every rule of a valid schedule on the way."""
    walk = _Walk(program, len(actions))
    for step, action in enumerate(actions):
        walk.play(step, action)
    return walk.finish()


class _Walk:
    """Validity and residencies, action by action."""

    def __init__(self, program: Program, num_steps: int) -> None:
        self.program = program
        self.num_steps = num_steps
        self.resident = set(program.resident)
        self.keep = program.kept
        self.born: dict[int, int] = {}  # storage -> step its residency began
        self.last: dict[int, int] = {}  # storage -> step of its last read in that residency
        self.copying: set[int] = set()  # offload issued, Free not yet
        self.copied: set[int] = set()  # a copy exists on a tier (of this storage's present value)
        self.arriving: set[int] = set()  # reload issued, Wait not yet
        self.computed: set[int] = set()
        self.done: list[tuple[int, int, int]] = []
        self.backward = False
        self.last_draw = -1  # the random op that ran last for the first time: they run in captured order

    def fail(self, step: int, action: Action, why: str) -> None:
        raise VerifyError(f"schedule of {self.program.name}, step {step}, {action}: {why}")

    def play(self, step: int, action: Action) -> None:
        for storage in reads_of(self.program, action):
            if storage in self.resident:
                continue
            if storage not in self.born:
                self.fail(step, action, f"storage {storage} ({self._name(storage)}) is not on the device")
            if storage in self.arriving:
                self.fail(
                    step, action, f"storage {storage} ({self._name(storage)}) is read before its reload was waited for"
                )
            self.last[storage] = step
        match action:
            case Compute(op) | Recompute(op):
                self._run(step, action, op)
            case StartBackward():
                if self.backward:
                    self.fail(step, action, "backward started twice")
                self.backward = True
                for index in self.program.released:  # alive until forward has returned it
                    self.last.update((s, step) for s in self.program.ops[index].storages if s in self.born)
            case Offload(storage):
                if storage in self.resident or storage in self.copied:
                    self.fail(step, action, "it is resident or already offloaded")
                self.copying.add(storage)
                self.copied.add(storage)
            case Free(storage):
                if storage not in self.born or storage not in self.copied or storage in self.arriving:
                    self.fail(step, action, "nothing on the device to give back, or no copy of it")
                self._close(storage, step - 1)
            case Reload(storage):
                if storage not in self.copied:
                    self.fail(step, action, "it was never offloaded")
                if storage in self.copying:
                    self.fail(step, action, "its bytes were never given back")
                if storage in self.born:
                    self._close(storage, self.last[storage])
                self._open(storage, step)
                self.arriving.add(storage)
            case Wait(storage):
                if storage not in self.arriving:
                    self.fail(step, action, "no reload is pending")
                self.arriving.discard(storage)
                self.last[storage] = step

    def _run(self, step: int, action: Action, index: int) -> None:
        op = self.program.ops[index]
        if self.program.is_folded(op):
            self.fail(step, action, f"{op.name} owns no bytes: it is re-derived, never scheduled")
        again = isinstance(action, Recompute)
        if again != (index in self.computed):
            self.fail(step, action, "computed twice" if not again else "recomputed before it was computed")
        if op.is_random and not again and index < self.last_draw:
            self.fail(step, action, f"{self.program.ops[self.last_draw].name} has drawn before it")
        self.last_draw = max(self.last_draw, index if op.is_random else -1)
        if again and not op.recomputable:
            self.fail(step, action, f"{op.name} may not run twice")
        if not self.backward and op.region == "backward":
            self.fail(step, action, f"backward op {op.name} before StartBackward")
        self.computed.add(index)
        for storage in self.program.allocates(op):
            if storage in self.copying or storage in self.arriving:
                self.fail(step, action, f"storage {storage} is being copied")
            if storage in self.born and storage in self.keep:  # returned to the caller: the copy is a transient
                self.done.append((storage, step, step))
                continue
            if storage in self.born:
                self._close(storage, self.last[storage])
            self.copied.discard(storage)
            self._open(storage, step)

    def _open(self, storage: int, step: int) -> None:
        self.born[storage] = self.last[storage] = step

    def _close(self, storage: int, last: int) -> None:
        self.done.append((storage, self.born.pop(storage), last))
        self.copying.discard(storage)

    def _name(self, storage: int) -> str:
        return self.program.ops[self.program.producer[storage]].name

    def finish(self) -> list[tuple[int, int, int]]:
        kept = (i for i in self.program.forward_outputs if i not in self.program.released)
        for index in (*kept, *self.program.backward_outputs):
            for storage in self.program.ops[index].storages:
                if storage not in self.born and storage not in self.resident:
                    raise VerifyError(
                        f"schedule of {self.program.name}: output {self.program.ops[index].name} is gone at the end"
                    )
        for op in self.program.ops:
            if (op.mutates or op.is_collective) and op.index not in self.computed:
                raise VerifyError(f"schedule of {self.program.name}: {op.name} has effects but never runs")
        for storage in list(self.born):
            held = storage in self.keep or storage in self.copying or storage in self.arriving
            self._close(storage, self.num_steps if held else self.last[storage])
        return self.done


def _bytes_at(
    program: Program, actions: Sequence[Action], lifetimes: Iterable[tuple[int, int, int]]
) -> npt.NDArray[np.int64]:
    nbytes = program.nbytes()
    delta = np.zeros(len(actions) + 2, dtype=np.int64)
    for storage, first, last in lifetimes:
        delta[first] += nbytes[storage]
        delta[last + 1] -= nbytes[storage]
    level = resident_bytes(program) + np.cumsum(delta)[: len(actions)]
    for step, action in enumerate(actions):
        if isinstance(action, (Compute, Recompute)):
            level[step] += program.ops[action.op].workspace_bytes
    return level


def _tier_peak_bytes(program: Program, actions: Sequence[Action]) -> dict[Tier, int]:
    """Most bytes on each tier: a copy stands from its `Offload` to the last `Wait` for it (to the end without one)."""
    nbytes = program.nbytes()
    copies: dict[int, tuple[Tier, int, int]] = {}  # by step of the Offload: tier, bytes, last step
    newest: dict[int, int] = {}
    for step, action in enumerate(actions):
        if isinstance(action, Offload):
            newest[action.storage] = step
            copies[step] = action.tier, nbytes[action.storage], len(actions)
        elif isinstance(action, Wait):
            first = newest[action.storage]
            copies[first] = (*copies[first][:2], step)
    change = {tier: np.zeros(len(actions) + 2, dtype=np.int64) for tier, *_ in copies.values()}
    for first, (tier, size, last) in copies.items():
        change[tier][first] += size
        change[tier][last + 1] -= size
    return {tier: int(np.cumsum(delta).max()) for tier, delta in change.items()}


class _Clock:
    """Seconds: every wait refers to an earlier record, so a schedule is max-plus and can't deadlock."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self.program, self.machine = program, machine
        self.nbytes = program.nbytes()
        self.now = self.compute_s = self.recompute_s = 0.0
        self.streams: dict[str, float] = {}
        self.tier_of: dict[int, Tier] = {}
        self.out_end: dict[int, float] = {}
        self.in_end: dict[int, float] = {}
        self.bytes_moved = 0
        self.spans: list[Span] = []

    def play(self, step: int, action: Action) -> None:
        match action:
            case Compute(op) | Recompute(op):
                seconds = self.program.ops[op].seconds
                self.spans.append(Span("compute", self.now, self.now + seconds, step))
                self.now += seconds
                self.compute_s += seconds
                if isinstance(action, Recompute):
                    self.recompute_s += seconds
            case Offload(storage, tier):
                if tier not in self.machine.links:
                    raise VerifyError(f"step {step}, {action}: the machine has no {tier} tier")
                self.tier_of[storage] = tier
                self.out_end[storage] = self._copy(step, storage, "out", self.now)
            case Free(storage):
                self.now = max(self.now, self.out_end[storage])
            case Reload(storage):
                self.in_end[storage] = self._copy(step, storage, "in", max(self.now, self.out_end[storage]))
            case Wait(storage):
                self.now = max(self.now, self.in_end[storage])

    def _copy(self, step: int, storage: int, direction: str, ready_s: float) -> float:
        tier = self.tier_of[storage]
        stream = f"{tier}_{direction}"
        start = max(self.streams.get(stream, 0.0), ready_s)
        nbytes = self.nbytes[storage]
        end = start + self.machine.links[tier].seconds(nbytes, direction == "out")
        self.streams[stream] = end
        self.bytes_moved += nbytes
        self.spans.append(Span(stream, start, end, step))
        return end
