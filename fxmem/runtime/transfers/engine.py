"""Transfer engines: move the slots of a plan between the device and its tiers, step by step in flight.

The graph decides *when* (see `ops` beside this file); an engine decides nothing. Device bytes are given up in `free`
and taken in `reload`, whatever the timing of the copies. A *step* is one run of the graph: it owns an arena from its
first offload until its last handle dies, so that several forwards may be in flight, and backward may run again or
never.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.arena import Arena, open_arena
from fxmem.runtime.transfers.disk_file import DiskFile, shared_file
from fxmem.runtime.transfers.layout import Layout, lay_out

Moment = Literal["arena", "out", "in"]
Hook = Callable[[Moment, int], None]
"""Called as hook(moment, slot) where a copy (or, with slot -1, an arena) is about to start; may sleep or raise."""


_STALE = (
    "offload: slot {} is reloaded after another took its place: backward has already run once and reused the memory; "
    "to run it twice (retain_graph=True) compile without tiers"
)
_OVER = (
    "offload: step {} is over; its handles were used after they died. Saved-tensor hooks that copy what forward saves "
    "(torch.autograd.graph.save_on_cpu and the like) copy handles, too, which ends the step: leave tensors of int64 on "
    "the CPU as they are, or compile without tiers"
)
_FORKED = "offload: this step began in another process, before a fork; run forward again in this one"
_RECENT_STEPS = 16
"""As many idle arenas are kept as would have served that many steps, the last ones."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What an engine holds now, in bytes, and how often it has allocated since it was made."""

    host_bytes: int
    disk_bytes: int
    pending_device_bytes: int
    num_steps: int
    num_arenas: int
    num_allocations: int


class Step:
    """One run of the graph, alive as long as a handle of it is."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(eq=False)
class Transfer:
    """State of one slot in one step. `source`: device bytes on their way out; `targets`: those being filled.

    `copied`: the engine's own mark of the copy out.
    """

    slot: int
    nbytes: int
    source: torch.Tensor | None = None
    targets: dict[int, torch.Tensor] = field(default_factory=dict)  # data pointer -> bytes
    num_reloads: int = 0
    copied: Any = None
    is_stale: bool = False  # another slot of the step took over its place


@dataclass(eq=False)
class StepState:
    """What the engine keeps for a step. `arena`: None once it is over or has failed."""

    number: int
    arena: Arena | None
    transfers: dict[int, Transfer] = field(default_factory=dict)
    spills: dict[int, Arena] = field(default_factory=dict)  # slots that outgrew the arena (symbolic shapes)
    error: str = ""  # why the step failed; a message, for an exception would keep the step's handles alive

    def place(self, slot: int) -> tuple[Arena, int]:
        """Arena that holds `slot`, and the slot's number in it."""
        if slot in self.spills:
            return self.spills[slot], 0
        if self.arena is None:
            raise OffloadError("offload: the step is over")
        return self.arena, slot


def _retire(retired: deque[int], state: StepState) -> None:
    """A step's last handle died, on whatever thread: device bytes on their way out are given up, all else is for later.

    A copy that still reads them holds them (CPU), or reads what nobody will want (CUDA).
    """
    for transfer in list(state.transfers.values()):
        transfer.source = None
    retired.append(state.number)


class Engine(ABC):
    """Moves the slots of one plan. Call from one thread at a time; subclasses do the copying.

    `offload` .. `free` brackets a copy out: `free` waits (on the compute stream) and drops the device bytes.
    `reload` .. `wait` brackets a copy in: `reload` takes the bytes, after `wait` they may be read.
    Every failure is an OffloadError; it ends the step it happens in, and no other.
    """

    pinned_for: torch.device | None = None
    """CUDA device for which host memory is page-locked."""

    def __init__(self, layout: Layout, file: DiskFile | None = None, hook: Hook | None = None) -> None:
        self.layout = layout
        self.file = file
        self.hook: Hook = hook or (lambda moment, slot: None)
        self.num_allocations = 0
        self._num_steps = 0
        self._steps: dict[int, StepState] = {}
        self._alive: weakref.WeakValueDictionary[int, Step] = weakref.WeakValueDictionary()
        self._idle: list[Arena] = []
        self._recent: deque[int] = deque(maxlen=_RECENT_STEPS)  # steps in flight at the beginning of each
        self._retired: deque[int] = deque()  # appended to by finalizers, anywhere: no locks there
        self._is_closed = False
        _ALL.add(self)

    # copies, by subclass; each may raise OffloadError

    @abstractmethod
    def _start_out(self, state: StepState, transfer: Transfer) -> None:
        """Copy `transfer.source` to its place; returns at once."""

    @abstractmethod
    def _finish_out(self, state: StepState, transfer: Transfer) -> None:
        """Make compute wait for that copy."""

    @abstractmethod
    def _start_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        """Copy the slot to `target`; returns at once."""

    @abstractmethod
    def _finish_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        """Make compute wait for that copy."""

    @abstractmethod
    def _quiesce(self, state: StepState) -> None:
        """Return once no copy of the step touches device bytes or arena in a way that a later user could notice."""

    @abstractmethod
    def _empty(self, nbytes: int) -> torch.Tensor:
        """Flat uint8 device tensor."""

    # steps

    def begin(self) -> Step:
        """Start a step. Raises OffloadError if there is no room for it on a tier."""
        self.collect()
        if self._is_closed:
            raise OffloadError("offload: the engine of this graph was closed")
        arena = self._idle.pop() if self._idle else None
        if arena is not None and arena.layout is not self.layout:
            arena.close()
            arena = None
        arena = arena or self._open_arena(self.layout)
        self._num_steps += 1
        step = Step(self._num_steps)
        state = self._steps[step.number] = StepState(step.number, arena)
        self._alive[step.number] = step
        weakref.finalize(step, _retire, self._retired, state).atexit = False
        self._recent.append(self._num_in_flight())
        self._trim()
        return step

    def step(self, number: int) -> Step:
        """The step that a handle names. Raises OffloadError if it is over."""
        step = self._alive.get(number)
        if step is None:
            raise OffloadError(_OVER.format(number))
        return step

    def _open_arena(self, layout: Layout) -> Arena:
        self.hook("arena", -1)
        arena = open_arena(layout, self.file, self.pinned_for)
        self.num_allocations += 1
        return arena

    def collect(self) -> None:
        """Take back the arenas of steps whose handles have all died."""
        while self._retired:
            self._abandon(self._steps.pop(self._retired.popleft()))
        self._trim()

    def _trim(self) -> None:
        """Close idle arenas that no recent step would have needed."""
        while self._idle and len(self._idle) + self._num_in_flight() > max(self._recent, default=0):
            self._idle.pop().close()

    def _num_in_flight(self) -> int:
        return sum(state.arena is not None for state in self._steps.values())

    def retire(self) -> None:
        """Another plan took over: what idles is given back now, the rest as the steps in flight end."""
        self._recent = deque(maxlen=0)
        self.collect()

    def forget(self) -> None:
        """In a forked child: the parent's arenas, file and copies are not its own; steps begun before the fork fail."""
        for state in self._steps.values():
            state.error, state.arena = _FORKED, None
            state.transfers.clear()
            state.spills.clear()
        self._idle.clear()
        if self.file is not None:
            self.file = shared_file(self.file.folder)

    def _abandon(self, state: StepState) -> None:
        """End a step: what it holds on the device and the tiers is free from here on."""
        self._quiesce(state)
        arena, state.arena = state.arena, None
        if arena is not None and not self._is_closed:
            self._idle.append(arena)
        elif arena is not None:
            arena.close()
        state.transfers.clear()
        for spill in state.spills.values():
            spill.close()
        state.spills.clear()

    def _fit(self, state: StepState, slot: int, nbytes: int) -> None:
        """Room for a slot that is larger than planned: of its own in this step, in the arena from the next one on."""
        arena, index = state.place(slot)
        if nbytes <= arena.layout.slots[index].nbytes:
            return
        sizes = [max(place.nbytes, nbytes if i == slot else 0) for i, place in enumerate(self.layout.slots)]
        if sizes[slot] > self.layout.slots[slot].nbytes:
            self.layout = self.layout.resized(sizes)
        alone = lay_out([replace(self.layout.slots[slot], nbytes=nbytes)], self.layout.staged)
        if slot in state.spills:
            state.spills.pop(slot).close()
        state.spills[slot] = self._open_arena(alone)

    def _mark_overwritten(self, state: StepState, slot: int) -> None:
        if slot in state.spills or state.arena is None:
            return
        slots = state.arena.layout.slots
        mine = slots[slot]
        for other in state.transfers.values():
            theirs = slots[other.slot]
            if other.slot != slot and other.slot not in state.spills and theirs.tier == mine.tier:
                start = max(mine.offset, theirs.offset)
                end = min(mine.offset + mine.nbytes, theirs.offset + theirs.nbytes)
                other.is_stale = other.is_stale or start < end

    # the four operations

    def offload(self, step: Step, slot: int, tensor: torch.Tensor) -> None:
        """Start copying `tensor` (flat uint8) to `slot`."""
        state = self._state(step)
        nbytes = tensor.numel()
        self._guarded(state, self._fit, state, slot, nbytes)
        self._mark_overwritten(state, slot)
        transfer = state.transfers[slot] = Transfer(slot, nbytes, source=tensor)
        self._guarded(state, self._start_out, state, transfer)

    def free(self, step: Step, slot: int) -> None:
        """Compute waits for the copy out; the engine's reference to the device bytes is dropped."""
        state = self._state(step)
        transfer = self._transfer(state, slot)
        if transfer.source is not None:
            self._guarded(state, self._finish_out, state, transfer)
            transfer.source = None

    def reload(self, step: Step, slot: int) -> torch.Tensor:
        """Take device bytes (flat uint8) and start filling them from `slot`."""
        state = self._state(step)
        transfer = self._transfer(state, slot)
        if transfer.is_stale:
            self._fail(state, _STALE.format(slot))
        if transfer.source is not None:
            self._fail(state, f"offload: slot {slot} is reloaded before its bytes were given up")
        target = self._empty(transfer.nbytes)
        transfer.num_reloads += 1
        transfer.targets[target.data_ptr()] = target
        self._guarded(state, self._start_in, state, transfer, target)
        return target

    def wait(self, step: Step, slot: int, tensor: torch.Tensor) -> None:
        """Compute waits until `tensor`, which lies in what `reload` returned, is filled."""
        state = self._state(step)
        transfer = self._transfer(state, slot)
        target = transfer.targets.get(tensor.untyped_storage().data_ptr())
        if target is None:
            self._fail(state, f"offload: slot {slot} was waited for with a tensor that no reload is filling")
        self._guarded(state, self._finish_in, state, transfer, target)
        del transfer.targets[target.data_ptr()]

    def levels(self) -> Levels:
        self.collect()
        arenas = list(self._idle)
        for state in self._steps.values():
            arenas += [*([] if state.arena is None else [state.arena]), *state.spills.values()]
        pending = [t for state in self._steps.values() for t in state.transfers.values()]
        return Levels(
            host_bytes=sum(arena.host.nbytes for arena in arenas),
            disk_bytes=sum(arena.layout.disk_bytes for arena in arenas),
            pending_device_bytes=sum(t.nbytes * ((t.source is not None) + len(t.targets)) for t in pending),
            num_steps=len(self._steps),
            num_arenas=len(arenas),
            num_allocations=self.num_allocations,
        )

    def close(self) -> None:
        """Give everything back; steps in flight fail from here on. Idempotent."""
        self._is_closed = True
        self.collect()
        for state in self._steps.values():
            state.error = state.error or "offload: the engine of this graph was closed"
            self._abandon(state)
        for arena in self._idle:
            arena.close()
        self._idle.clear()

    # checks

    def _state(self, step: Step) -> StepState:
        state = self._steps[step.number]
        if state.error:
            raise OffloadError(state.error)
        return state

    def _transfer(self, state: StepState, slot: int) -> Transfer:
        transfer = state.transfers.get(slot)
        if transfer is None:
            self._fail(state, f"offload: slot {slot} was never offloaded in this step")
        return transfer

    def _guarded(self, state: StepState, call: Callable[..., None], *args: object) -> None:
        """Run `call`; whatever goes wrong fails the step and gives its device bytes back."""
        try:
            call(*args)
        except OffloadError as error:
            self._fail(state, str(error), error.__cause__)
        except Exception as error:
            self._fail(state, f"offload: a copy failed ({type(error).__name__}: {error})", error)

    def _fail(self, state: StepState, message: str, cause: BaseException | None = None) -> NoReturn:
        state.error = message
        self._abandon(state)
        raise OffloadError(message) from cause


_ALL: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_ALL):
        engine.forget()


os.register_at_fork(after_in_child=_after_fork)
