"""Three-way states in the compiled kernel: keep, recompute or offload, and drops in mid-backward.

Evaluation emits backward with just-in-time recompute, finds working sets by reverse liveness, places transfers in the
bytes that are left and plays compute, copies out and copies in on three clocks. It agrees with the simulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fxmem.planners.effort import Effort, work_until
from fxmem.planners.kernel.binding import Kernel, State, mutated
from fxmem.planners.problem import Problem
from fxmem.schedule.actions import Action, Compute, Free, Offload, Recompute, Reload, StartBackward, Tier, Wait
from fxmem.schedule.simulate import Link, without_unread_states

KEEP, OFFLOAD = 1, 2
MIN_BYTES = 64 << 10
"""Smaller storages cost more in latency than they give back, unless the whole step is small."""
_SMALL_SHARE = 1024


@dataclass(frozen=True)
class JointScore:
    """`extra_s`: seconds over running everything once, waits included; `moved_bytes`: copied, both directions; the rest
    as in `Score`."""

    extra_s: float
    peak_bytes: int
    over_bytes: float
    worst: int
    moved_bytes: int


class _Joint(ctypes.Structure):
    _fields_ = (
        ("extra", ctypes.c_double),
        ("peak", ctypes.c_int64),
        ("over", ctypes.c_double),
        ("worst", ctypes.c_int),
        ("moved", ctypes.c_double),
    )


def offloadable(problem: Problem, pinned: frozenset[int] = frozenset()) -> npt.NDArray[np.uint8]:
    """Storages that may leave the device: made in forward, not returned, not written in place, not `pinned`, and of
    64 KiB or more (a thousandth of all that could leave, if that is less)."""
    made = problem.producer
    good = (made >= 0) & (made < problem.num_forward) & ~problem.keep_to_end & ~mutated(problem)
    good[list(pinned)] = False
    good &= ~np.isin(made, [problem.kernel_of_op.get(op, -1) for op in problem.program.states])
    total = int(problem.nbytes[good].sum())
    good &= problem.nbytes >= max(1, min(MIN_BYTES, total // _SMALL_SHARE))
    return good.astype(np.uint8)


def within(
    problem: Problem, can: npt.NDArray[np.uint8], capacity_bytes: int | None, first: Collection[int] = ()
) -> npt.NDArray[np.uint8]:
    """`can` cut down to storages that fit on a tier all at once: those of `first`, then the others, largest first."""
    if capacity_bytes is None:
        return can
    left, chosen = capacity_bytes, np.zeros_like(can)
    wanted = set(first)
    for storage in sorted(np.flatnonzero(can).tolist(), key=lambda s: (s not in wanted, -int(problem.nbytes[s]), s)):
        if problem.nbytes[storage] <= left:
            chosen[storage] = 1
            left -= int(problem.nbytes[storage])
    return chosen


@cache
def _declare(lib: ctypes.CDLL) -> None:
    pointer, real, integer, wide = ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_int64
    out = ctypes.POINTER(_Joint)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "fx_off_new": (pointer, [pointer] * 4),
        "fx_off_free": (None, [pointer]),
        "fx_off_load": (None, [pointer, pointer, integer, pointer, pointer]),
        "fx_off_evaluate": (None, [pointer, wide, out]),
        "fx_off_num_events": (integer, [pointer]),
        "fx_off_events": (integer, [pointer] * 3),
        "fx_off_greedy": (integer, [pointer, wide, integer, integer, real, wide, out]),
        "fx_off_polish": (None, [pointer, wide, integer, wide, out]),
        "fx_off_perturb": (integer, [pointer, wide, integer, integer, real, wide, out]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments


class JointKernel:
    """One problem and one link in the compiled kernel, with a current three-way state: `State.saved[s]` is 0 for
    recompute, KEEP or OFFLOAD. A drop of an offloaded storage gives its bytes back until the next use. Not thread-safe.
    """

    def __init__(
        self, problem: Problem, link: Link, can_offload: npt.NDArray[np.uint8], effort: Effort | None = None
    ) -> None:
        self.problem, self.link = problem, link
        self.can = np.ascontiguousarray(can_offload, dtype=np.uint8)
        self.two_way = Kernel(problem, effort=effort)
        self.effort = self.two_way.effort
        self.cand, self.lib, self.base = self.two_way.cand, self.two_way.lib, problem.base_bytes
        _declare(self.lib)
        out = np.array([link.seconds(int(b), True) for b in problem.nbytes], dtype=np.float64)
        back = np.array([link.seconds(int(b), False) for b in problem.nbytes], dtype=np.float64)
        self.off = self.lib.fx_off_new(self.two_way.ctx, self.can.ctypes.data, out.ctypes.data, back.ctypes.data)

    def __del__(self) -> None:
        if getattr(self, "off", None):
            self.lib.fx_off_free(self.off)
            self.off = None

    def load(self, state: State) -> None:
        """Make `state` the current one (what may not be recomputed or offloaded is kept whatever it says)."""
        saved = np.ascontiguousarray(state.saved, dtype=np.uint8)
        pairs = np.array(state.drops, dtype=np.int32).reshape(-1, 2)
        b, s = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        self.lib.fx_off_load(self.off, saved.ctypes.data, len(b), b.ctypes.data, s.ctypes.data)

    def store(self) -> State:
        """The current state."""
        return self.two_way.store()

    def all_saved(self) -> State:
        return self.two_way.all_saved()

    def all_offloaded(self) -> State:
        """Everything that may leave the device leaves it."""
        return State(np.where(self.can, OFFLOAD, KEEP).astype(np.uint8))

    def _score(self, result: _Joint) -> JointScore:
        return JointScore(
            result.extra, result.peak + self.base, result.over, result.worst, int(min(result.moved, 2.0**62))
        )

    def evaluate(self, budget_bytes: int) -> JointScore:
        """Exact seconds and bytes of the current state; transfers are placed so as to fit in `budget_bytes`."""
        out = _Joint()
        self.lib.fx_off_evaluate(self.off, budget_bytes - self.base, ctypes.byref(out))
        return self._score(out)

    def greedy(
        self, budget_bytes: int, look: int = 8, rounds: int = 1 << 30, noise: float = 0.0, deadline_s: float = 0.0
    ) -> JointScore:
        """Take the decision cheapest per byte of overflow until the peak fits, if it can."""
        out, end = _Joint(), work_until(deadline_s)
        self.lib.fx_off_greedy(self.off, budget_bytes - self.base, look, rounds, noise, end, ctypes.byref(out))
        return self._score(out)

    def polish(self, budget_bytes: int, passes: int = 4, deadline_s: float = 0.0) -> JointScore:
        """Change single decisions while time falls and the peak fits."""
        out, end = _Joint(), work_until(deadline_s)
        self.lib.fx_off_polish(self.off, budget_bytes - self.base, passes, end, ctypes.byref(out))
        return self._score(out)

    def perturb(
        self, budget_bytes: int, seconds: float, rounds: int = 1 << 30, strength: int = 4, temperature: float = 1e-3
    ) -> JointScore:
        """Rounds of: a few random decisions, greedy with noise, polish; ends in the best state seen."""
        out, end = _Joint(), work_until(self.effort.now() + seconds)
        room = budget_bytes - self.base
        self.lib.fx_off_perturb(self.off, room, rounds, strength, temperature, end, ctypes.byref(out))
        return self._score(out)

    def actions(self, state: State, budget_bytes: int, tier: Tier) -> tuple[Action, ...]:
        """The schedule of `state` under `budget_bytes`."""
        self.load(state)
        self.evaluate(budget_bytes)
        n = self.lib.fx_off_num_events(self.off)
        kinds, whats = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
        num_forward = self.lib.fx_off_events(self.off, kinds.ctypes.data, whats.ctypes.data)
        return _as_actions(self.problem, kinds.tolist(), whats.tolist(), num_forward, tier)


def _as_actions(
    problem: Problem, kinds: list[int], whats: list[int], num_forward: int, tier: Tier
) -> tuple[Action, ...]:
    actions: list[Action] = []
    ran: set[int] = set()
    num_run = 0
    for kind, what in zip(kinds, whats, strict=True):
        if kind == 0:
            if num_run == num_forward:
                actions.append(StartBackward())
            op = int(problem.kernel_op[what])
            actions.append(Recompute(op) if what in ran else Compute(op))
            ran.add(what)
            num_run += 1
        else:
            actions.append((Offload(what, tier), Free(what), Reload(what), Wait(what))[kind - 1])
    if num_run == num_forward:
        actions.append(StartBackward())
    return without_unread_states(problem.program, actions)
