"""The compiled planner kernel behind a typed Python face: states, exact evaluation, eviction, repair, polish, search.

A `State` decides for the storages that forward creates: is it kept across the start of backward, and after which
backward kernels is it forgotten again. Evaluation emits backward with just-in-time recompute and finds the bytes at
every step by one reverse liveness pass; it agrees with the simulator exactly.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import os
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fxmem.analysis.cache import cache_dir
from fxmem.errors import FxmemError
from fxmem.planners.effort import Effort, work_until
from fxmem.planners.problem import IntArray, Problem

SOURCES = ("_kernel.c", "_evict.c", "_search.c", "_offload.c", "_offload_search.c")
HEADERS = ("_kernel.h", "_offload.h")
_STATE_S = 2e-5  # of handing a state over
_SMALL_SHARE = 1e-3  # storages whose sizes add up to this share of all that backward could keep are always kept


@dataclass(frozen=True)
class State:
    """`saved[s]`: kept across the start of backward. `drops`: (backward kernel, storage) forgotten after it."""

    saved: npt.NDArray[np.uint8]
    drops: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Score:
    """`extra_s` seconds over running everything once; `peak_bytes` with everything resident; `over_bytes`: bytes above
    the budget summed over segments (a forward kernel, or a backward kernel with its recomputation); `worst`: step of
    the peak, backward step t as t, forward kernel k as -1 - k."""

    extra_s: float
    peak_bytes: int
    over_bytes: float
    worst: int


@dataclass(frozen=True)
class Steps:
    """The last evaluation, step by step. Backward: `kernels`, the backward kernel each belongs to (`segments`), bytes
    above base. Forward: bytes per kernel (0 if skipped), which run, and which storages cross the boundary (`carried`).
    """

    kernels: npt.NDArray[np.int32]
    segments: npt.NDArray[np.int32]
    nbytes: IntArray
    forward_bytes: IntArray
    forward_runs: npt.NDArray[np.bool_]
    carried: npt.NDArray[np.bool_]


class _Eval(ctypes.Structure):
    _fields_ = (
        ("extra", ctypes.c_double),
        ("peak", ctypes.c_int64),
        ("over", ctypes.c_double),
        ("worst", ctypes.c_int),
    )


def _build(target: Path) -> None:
    """Compile the kernel; raises FxmemError when no C compiler works."""
    folder = Path(__file__).parent
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernel.so"
        command = [*shlex.split(os.environ.get("CC", "cc")), "-O3", "-std=c99", "-shared", "-fPIC", "-o", str(built)]
        try:
            subprocess.run(
                [*command, *(str(folder / s) for s in SOURCES), "-lm"], check=True, capture_output=True, text=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise FxmemError(
                f"the planner kernel could not be compiled: {getattr(error, 'stderr', '') or error}"
            ) from error
        built.replace(target)


def _library_path() -> Path:
    """$FXMEM_KERNEL (a build with sanitizers, see CONTRIBUTING); else the installed extension unless its sources are
    newer (a working tree), then a cached build of them."""
    if named := os.environ.get("FXMEM_KERNEL"):
        return Path(named)
    folder = Path(__file__).parent
    sources = [folder / name for name in (*SOURCES, *HEADERS)]
    newest = max(s.stat().st_mtime for s in sources) if all(s.exists() for s in sources) else 0.0
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        built = folder / f"_kernel{suffix}"
        if built.exists() and built.stat().st_mtime >= newest:
            return built
    digest = hashlib.sha256(b"".join(s.read_bytes() for s in sources)).hexdigest()[:16]
    target = cache_dir() / f"kernel-{digest}.so"
    if not target.exists():
        _build(target)
    return target


@cache
def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(_library_path()))
    pointer, real, integer, wide = ctypes.c_void_p, ctypes.c_double, ctypes.c_int, ctypes.c_int64
    out = ctypes.POINTER(_Eval)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "fx_new": (pointer, [integer] * 3 + [pointer] * 12),
        "fx_free": (None, [pointer]),
        "fx_load": (None, [pointer, pointer, integer, pointer, pointer]),
        "fx_store": (integer, [pointer, pointer, integer, pointer, pointer]),
        "fx_evaluate": (None, [pointer, wide, out]),
        "fx_num_steps": (integer, [pointer]),
        "fx_steps": (integer, [pointer] * 7),
        "fx_seed": (None, [pointer, ctypes.c_uint64]),
        "fx_classes": (None, [pointer, pointer]),
        "fx_evict": (integer, [pointer, wide, real, real, pointer]),
        "fx_repair": (integer, [pointer, wide, integer, integer, real, wide, out]),
        "fx_polish": (None, [pointer, wide, integer, wide, out]),
        "fx_perturb": (integer, [pointer, wide, integer, integer, real, wide, out]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


def candidates(problem: Problem) -> npt.NDArray[np.uint8]:
    """Storages a planner decides about: made by a recomputable forward kernel, not returned, not written in place, and
    not so small that together they are a thousandth of what could be saved."""
    made = problem.producer
    good = (made >= 0) & (made < problem.num_forward) & ~problem.keep_to_end
    good &= problem.recomputable[np.maximum(made, 0)] & ~mutated(problem)
    sizes = np.sort(problem.nbytes[good])
    total = np.cumsum(sizes)[np.searchsorted(sizes, sizes, side="right") - 1]  # with all of the same size
    small = sizes[total <= _SMALL_SHARE * total[-1]] if len(sizes) else sizes
    return (good & (problem.nbytes > (small[-1] if len(small) else 0))).astype(np.uint8)


def mutated(problem: Problem) -> npt.NDArray[np.bool_]:
    """Storages that some op writes in place."""
    mask = np.zeros(problem.num_storages, dtype=np.bool_)
    for op in problem.program.ops:
        mask[list(op.mutates)] = True
    return mask


class Kernel:
    """One problem in the compiled kernel, with a current state; its work counts towards `effort`. Not thread-safe; one
    per thread. Deadlines are of `effort.now()` (0: none)."""

    def __init__(
        self, problem: Problem, cand: npt.NDArray[np.uint8] | None = None, effort: Effort | None = None
    ) -> None:
        self.problem = problem
        self.effort = Effort() if effort is None else effort
        self.cand = candidates(problem) if cand is None else cand
        self.lib = _library()
        self.base = problem.base_bytes
        arrays = [
            np.ascontiguousarray(a, dtype=t)
            for a, t in (
                (problem.read_ptr, np.int32),
                (problem.read_idx, np.int32),
                (problem.write_ptr, np.int32),
                (problem.write_idx, np.int32),
                (problem.seconds, np.float64),
                (problem.workspace_bytes, np.int64),
                (problem.recomputable * (1 + problem.must_run), np.uint8),
                (problem.nbytes, np.int64),
                (problem.producer, np.int32),
                (problem.keep_to_end, np.uint8),
                (self.cand, np.uint8),
            )
        ]
        self.ctx = self.lib.fx_new(
            problem.num_kernels,
            problem.num_forward,
            problem.num_storages,
            *(a.ctypes.data for a in arrays),
            self.effort.address,
        )
        self.seed(0)

    def __del__(self) -> None:
        if getattr(self, "ctx", None):
            self.lib.fx_free(self.ctx)
            self.ctx = None

    def seed(self, value: int) -> None:
        """Seed the kernel's random numbers."""
        self.lib.fx_seed(self.ctx, value)

    def share(self, classes: npt.NDArray[np.int32]) -> None:
        """Storages of one class (by id) play the same part in identical blocks: what is learnt of one holds for all."""
        self.lib.fx_classes(self.ctx, np.ascontiguousarray(classes, dtype=np.int32).ctypes.data)

    def load(self, state: State) -> None:
        """Make `state` the current one (storages that are no candidates are kept whatever it says)."""
        self.effort.spend(_STATE_S)
        saved = np.ascontiguousarray(state.saved, dtype=np.uint8)
        pairs = np.array(state.drops, dtype=np.int32).reshape(-1, 2)
        b, s = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        self.lib.fx_load(self.ctx, saved.ctypes.data, len(b), b.ctypes.data, s.ctypes.data)

    def store(self) -> State:
        """The current state."""
        saved = np.empty(self.problem.num_storages, dtype=np.uint8)
        room = self.lib.fx_store(self.ctx, saved.ctypes.data, 0, None, None)
        b, s = np.empty(room, dtype=np.int32), np.empty(room, dtype=np.int32)
        self.lib.fx_store(self.ctx, saved.ctypes.data, room, b.ctypes.data, s.ctypes.data)
        return State(saved, tuple(sorted(zip(b.tolist(), s.tolist(), strict=True))))

    def all_saved(self) -> State:
        return State(np.ones(self.problem.num_storages, dtype=np.uint8))

    def _score(self, result: _Eval) -> Score:
        return Score(result.extra, result.peak + self.base, result.over, result.worst)

    def evaluate(self, budget_bytes: int) -> Score:
        """Exact seconds and bytes of the current state; `over_bytes` counts against `budget_bytes`."""
        result = _Eval()
        self.lib.fx_evaluate(self.ctx, budget_bytes - self.base, ctypes.byref(result))
        return self._score(result)

    def steps(self) -> Steps:
        """Step by step what the last evaluation saw."""
        p, n = self.problem, self.lib.fx_num_steps(self.ctx)
        kernels, segments = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
        nbytes, forward = np.empty(n, dtype=np.int64), np.empty(p.num_forward, dtype=np.int64)
        runs, carried = np.empty(p.num_forward, dtype=np.uint8), np.empty(p.num_storages, dtype=np.uint8)
        arrays = (kernels, segments, nbytes, forward, runs, carried)
        self.lib.fx_steps(self.ctx, *(a.ctypes.data for a in arrays))
        return Steps(kernels, segments, nbytes, forward, runs.astype(np.bool_), carried.astype(np.bool_))

    def order(self) -> tuple[list[int], int]:
        """Kernels in the order the current state runs them, and how many of them are forward's."""
        self.evaluate(0)
        steps = self.steps()
        forward = np.flatnonzero(steps.forward_runs).tolist()
        return forward + steps.kernels.tolist(), len(forward)

    def evict(
        self, budget_bytes: int, alpha: float, beta: float, factor: npt.NDArray[np.float64] | None = None
    ) -> bool:
        """Replace the state by look-ahead eviction's; True if it never ran out of room."""
        factor = np.ones(self.problem.num_storages) if factor is None else np.ascontiguousarray(factor)
        return bool(self.lib.fx_evict(self.ctx, budget_bytes - self.base, alpha, beta, factor.ctypes.data))

    def repair(
        self, budget_bytes: int, look: int = 8, rounds: int = 1 << 30, noise: float = 0.0, deadline_s: float = 0.0
    ) -> Score:
        """Toggle the decisions cheapest per byte of overflow until the peak fits, if it can. `look`: decisions examined
        beyond the best so far."""
        out, end = _Eval(), work_until(deadline_s)
        self.lib.fx_repair(self.ctx, budget_bytes - self.base, look, rounds, noise, end, ctypes.byref(out))
        return self._score(out)

    def polish(self, budget_bytes: int, looks: int = 1 << 30, deadline_s: float = 0.0) -> Score:
        """Undo decisions that are no longer worth their time, the peak staying under the budget."""
        out, end = _Eval(), work_until(deadline_s)
        self.lib.fx_polish(self.ctx, budget_bytes - self.base, looks, end, ctypes.byref(out))
        return self._score(out)

    def perturb(
        self, budget_bytes: int, seconds: float, rounds: int, strength: int = 4, temperature: float = 1e-3
    ) -> Score:
        """Rounds of: undo some decisions, repair with noise, polish; ends in the best state seen."""
        out, end = _Eval(), work_until(self.effort.now() + seconds)
        self.lib.fx_perturb(self.ctx, budget_bytes - self.base, rounds, strength, temperature, end, ctypes.byref(out))
        return self._score(out)
