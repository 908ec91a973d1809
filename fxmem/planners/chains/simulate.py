"""An exact simulator of chain schedules: one compute stream and two in-order links.

It knows nothing of planners. Bytes are charged and returned at program points only, so that the peak is a property of
the program and not of timing; the clock is the max-plus evaluation of three streams (compute, D2H, H2D):

* ``Forward(i, NONE)`` reads ``a_i`` and makes ``a_{i+1}``; a floating input is gone afterwards.
* ``Forward(i, INPUT)`` also keeps ``a_i`` (a checkpoint) until ``Backward(i)``.
* ``Forward(i, ALL)`` keeps ``a_i`` and everything the block saves, its output included, until ``Backward(i)``.
* ``Backward(i)`` reads ``g_{i+1}``, ``a_i`` and what block i saved; returns them and makes ``g_i``.
* ``Offload(x)`` starts a copy out, in order, once all that precedes it on the compute stream is done.
* ``Free(x)`` lets compute wait for that copy, then returns the bytes. ``Reload(x)`` charges the bytes and starts the
  copy back, in order. ``Wait(x)`` lets compute wait for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxmem.planners.chains.model import Chain, ChainError


class Keep(enum.Enum):
    """What a forward leaves behind for the backward."""

    NONE = "none"
    INPUT = "input"
    ALL = "all"


class Item(NamedTuple):
    """A stored value: ``("a", i)``, the checkpoint of boundary i, or ``("abar", i)``, all that block i saved."""

    kind: str
    at: int


@dataclass(frozen=True, slots=True)
class Forward:
    """Run block ``block``; with ``Keep.ALL`` save the set of option ``option``."""

    block: int
    keep: Keep
    option: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the backward of block ``block``."""

    block: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying ``item`` off the device."""

    item: Item


@dataclass(frozen=True, slots=True)
class Free:
    """Wait until ``item`` has been copied and give up its bytes."""

    item: Item


@dataclass(frozen=True, slots=True)
class Reload:
    """Take bytes for ``item`` and start copying it back."""

    item: Item


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until ``item`` is back."""

    item: Item


ComputeAction = Forward | Backward
Action = Forward | Backward | Offload | Free | Reload | Wait


@dataclass(slots=True)
class ChainRun:
    """What a schedule did: peak bytes, seconds, seconds that compute waited, forwards run, bytes moved out and back.

    ``during`` has the bytes at each compute action, ``uses`` for each stored item the compute actions that touched it,
    the one that made it first.
    """

    peak_bytes: int = 0
    time_s: float = 0.0
    stall_s: float = 0.0
    num_forwards: int = 0
    moved_bytes: int = 0
    during: list[int] = field(default_factory=list)
    uses: dict[Item, list[int]] = field(default_factory=dict)
    sizes: dict[Item, int] = field(default_factory=dict)


class _Machine:
    """The state of one simulated run."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.run = ChainRun()
        self.bytes = chain.resident
        self.floating: int | None = None  # boundary whose value is on the device but kept by nobody
        self.gradient = chain.num_blocks
        self.option: dict[int, int] = {}
        self.present: set[Item] = set()
        self.out: set[Item] = set()  # given up, not yet reloaded
        self.d2h = self.h2d = 0.0
        self.copied: dict[Item, float] = {}
        self.back: dict[Item, float] = {}

    def charge(self, size: int) -> None:
        self.run.peak_bytes = max(self.run.peak_bytes, self.bytes + size)

    def stall_until(self, moment: float) -> None:
        if moment > self.run.time_s:
            self.run.stall_s += moment - self.run.time_s
            self.run.time_s = moment

    def touch(self, item: Item) -> None:
        self.run.uses[item].append(len(self.run.during))

    def read_input(self, block: int) -> bool:
        """Check that ``a_block`` is on the device and settled; say whether it is floating."""
        if self.floating == block:
            return True
        if block == 0:
            return False
        for item in (Item("a", block), Item("abar", block - 1)):
            if item in self.present:
                if item in self.back:
                    raise ChainError(f"{item} is read before its reload was waited for")
                self.touch(item)
                return False
        raise ChainError(f"the input of block {block} is not on the device")

    def drop_floating(self) -> None:
        if self.floating is not None:
            self.bytes -= self.chain.a[self.floating]
            self.floating = None

    def store(self, item: Item, size: int, born: int) -> None:
        if item in self.present or item in self.out:
            raise ChainError(f"{item} is stored twice")
        self.present.add(item)
        self.run.sizes[item] = size
        self.run.uses[item] = [born]

    def forward(self, action: Forward) -> None:
        i, chain, now = action.block, self.chain, len(self.run.during)
        floats = self.read_input(i)
        if not floats:
            self.drop_floating()
        option = chain.options(i)[action.option if action.keep is Keep.ALL else 0]
        made = option.abar if action.keep is Keep.ALL else chain.a[i + 1]
        self.charge(made + option.wf)
        self.run.during.append(self.bytes + made + option.wf)
        self.bytes += made
        if floats and action.keep is Keep.NONE:
            self.drop_floating()
        elif floats and i > 0:
            self.store(Item("a", i), chain.a[i], now - 1)
            self.run.uses[Item("a", i)].append(now)
        if action.keep is Keep.ALL:
            self.store(Item("abar", i), option.abar, now)
            self.option[i] = action.option
            self.floating = None
        else:
            self.floating = i + 1
        self.run.time_s += option.u
        self.run.num_forwards += 1

    def backward(self, action: Backward) -> None:
        i, chain, saved = action.block, self.chain, Item("abar", action.block)
        if self.gradient != i + 1:
            raise ChainError(f"backward of block {i} comes when the gradient at boundary {self.gradient} is next")
        if saved not in self.present or saved in self.back:
            raise ChainError(f"backward of block {i}: what the block saved is not on the device")
        self.touch(saved)
        if self.read_input(i):
            raise ChainError(f"backward of block {i}: its input was not kept")
        self.drop_floating()
        option = chain.options(i)[self.option[i]]
        first = chain.g[i + 1] if i + 1 == chain.num_blocks else 0
        self.charge(first + chain.g[i] + option.wb)
        self.run.during.append(self.bytes + first + chain.g[i] + option.wb)
        self.bytes += first + chain.g[i] - chain.g[i + 1]
        self.run.time_s += option.v
        self.gradient = i
        for item in (saved, Item("a", i)):
            if item in self.present:
                self.present.discard(item)
                self.bytes -= self.run.sizes[item]
            elif item in self.out:
                raise ChainError(f"{item} was still off the device when its backward ran")

    def offload(self, item: Item) -> None:
        size = self.run.sizes.get(item)
        if size is None and item == Item("a", self.floating or 0) and self.floating:
            size = self.chain.a[self.floating]
        elif item not in self.present or size is None:
            raise ChainError(f"{item} can't be offloaded: it is not on the device")
        self.d2h = max(self.d2h, self.run.time_s) + size / self.chain.beta
        self.copied[item] = self.d2h
        self.run.moved_bytes += size

    def free(self, item: Item) -> None:
        if item not in self.present or item not in self.copied or item in self.back:
            raise ChainError(f"{item} can't be given up: it has no copy, or is not on the device")
        self.stall_until(self.copied[item])
        self.present.discard(item)
        self.out.add(item)
        self.bytes -= self.run.sizes[item]

    def reload(self, item: Item) -> None:
        if item not in self.out:
            raise ChainError(f"{item} can't be reloaded: it has not been given up")
        size = self.run.sizes[item]
        self.out.discard(item)
        self.present.add(item)
        self.bytes += size
        self.charge(0)
        self.h2d = max(self.h2d, self.run.time_s, self.copied[item]) + size / self.chain.beta
        self.back[item] = self.h2d
        self.run.moved_bytes += size

    def wait(self, item: Item) -> None:
        if item not in self.back:
            raise ChainError(f"{item} is waited for but not being reloaded")
        self.stall_until(self.back.pop(item))


def played(chain: Chain, compute: list[ComputeAction]) -> tuple[list[ComputeAction], ChainRun]:
    """Compute actions with their own run, for callers that place many selections of moved values over them."""
    return compute, simulate(chain, compute)


def simulate(chain: Chain, actions: Sequence[Action]) -> ChainRun:
    """Run a schedule and report its peak, time and moves.

    Raises ``ChainError`` when an action reads what is not on the device, or when the backward is not complete.
    """
    machine = _Machine(chain)
    for action in actions:
        match action:
            case Forward():
                machine.forward(action)
            case Backward():
                machine.backward(action)
            case Offload():
                machine.offload(action.item)
            case Free():
                machine.free(action.item)
            case Reload():
                machine.reload(action.item)
            case Wait():
                machine.wait(action.item)
    if machine.gradient != 0:
        raise ChainError(f"the schedule ends before the backward of block {machine.gradient - 1}")
    return machine.run
