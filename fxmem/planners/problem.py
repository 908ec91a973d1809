"""The reduced numeric view of a `Program` that planners work on: kernels that own bytes, storages, CSR arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fxmem.ir.program import Op, Program
from fxmem.schedule.actions import Action, Compute, Recompute, StartBackward
from fxmem.schedule.simulate import resident_bytes, without_unread_states

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Problem:
    """Kernels 0..N-1: `num_forward` that may run again, in captured order, then those that run once, in theirs: forward
    and backward, or another division (`interleaved`). Storages keep their ids 0..S-1.

    `kernel_op[k]`: the program's op. `seconds[k]`, `workspace_bytes[k]`, `recomputable[k]`. `must_run[k]`: it runs in
    its place whether its results are needed there or not. In CSR form kernel k reads
    read_idx[read_ptr[k]:read_ptr[k+1]] and creates write_idx[write_ptr[k]:write_ptr[k+1]]; resident storages (forward
    inputs) are not listed. `nbytes[s]`; `producer[s]`: kernel, or -1 (resident or unneeded); `keep_to_end[s]`: see
    `Program.kept`. `base_bytes`: on the device throughout. Tangents are zero-time, non-recomputable backward kernels.
    A random op reads the state that it draws from at its first run, too: a few KiB at most more than it really does.
    """

    program: Program
    num_forward: int
    kernel_op: IntArray
    seconds: npt.NDArray[np.float64]
    workspace_bytes: IntArray
    recomputable: npt.NDArray[np.bool_]
    must_run: npt.NDArray[np.bool_]
    read_ptr: IntArray
    read_idx: IntArray
    write_ptr: IntArray
    write_idx: IntArray
    nbytes: IntArray
    producer: IntArray
    keep_to_end: npt.NDArray[np.bool_]
    base_bytes: int

    @property
    def num_kernels(self) -> int:
        return len(self.kernel_op)

    @property
    def num_storages(self) -> int:
        return len(self.nbytes)

    @cached_property
    def kernel_of_op(self) -> dict[int, int]:
        return {int(op): k for k, op in enumerate(self.kernel_op)}

    @cached_property
    def baseline_s(self) -> float:
        """Seconds of the step with nothing recomputed."""
        return float(self.seconds.sum())

    def reads(self, kernel: int) -> IntArray:
        return self.read_idx[self.read_ptr[kernel] : self.read_ptr[kernel + 1]]

    def writes(self, kernel: int) -> IntArray:
        return self.write_idx[self.write_ptr[kernel] : self.write_ptr[kernel + 1]]

    @cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        """What each kernel reads, as plain integers (for loops in Python)."""
        return tuple(tuple(self.reads(k).tolist()) for k in range(self.num_kernels))

    @cached_property
    def results(self) -> tuple[tuple[int, ...], ...]:
        """What each kernel creates, as plain integers."""
        return tuple(tuple(self.writes(k).tolist()) for k in range(self.num_kernels))

    @cached_property
    def made_in_backward(self) -> frozenset[int]:
        """Storages that backward kernels create."""
        return frozenset(s for k in range(self.num_forward, self.num_kernels) for s in self.results[k])

    def actions(self, order: Iterable[int], num_forward_steps: int) -> tuple[Action, ...]:
        """Kernel order -> actions: the first run of a kernel is Compute, later ones Recompute; StartBackward after
        `num_forward_steps` kernels."""
        done: set[int] = set()
        out: list[Action] = []
        position = -1
        for position, kernel in enumerate(order):
            if position == num_forward_steps:
                out.append(StartBackward())
            op = int(self.kernel_op[kernel])
            out.append(Recompute(op) if kernel in done else Compute(op))
            done.add(kernel)
        if position < num_forward_steps:
            out.append(StartBackward())
        return without_unread_states(self.program, out)


def in_backward(op: Op) -> bool:
    return op.region == "backward"


def reduce_program(program: Program, runs_once: Callable[[Op], bool] = in_backward) -> Problem:
    """Fold views away and lay the rest out as arrays (bytes at the program's hints). `runs_once`: of which kernels the
    order stands; what one of them makes only others may read."""
    resident = set(program.resident)
    kernels = sorted(_needed(program), key=lambda op: (runs_once(op), in_backward(op)))  # tangents first in backward
    reads = [[s for s in (*program.reads(op), *op.mutates) if s not in resident] for op in kernels]
    reads = [list(dict.fromkeys(row)) for row in reads]
    writes = [list(program.allocates(op)) for op in kernels]
    keep = np.zeros(len(program.storages), dtype=np.bool_)
    keep[list(program.kept)] = True
    keep[list(resident)] = False
    kernel_at = {op.index: k for k, op in enumerate(kernels)}
    return Problem(
        program=program,
        num_forward=sum(not runs_once(op) for op in kernels),
        kernel_op=np.array([op.index for op in kernels], dtype=np.int64),
        seconds=np.array([op.seconds for op in kernels], dtype=np.float64),
        workspace_bytes=np.array([op.workspace_bytes for op in kernels], dtype=np.int64),
        recomputable=np.array([op.recomputable and not op.is_input for op in kernels], dtype=np.bool_),
        must_run=np.array([op.is_random or op.is_input or not op.recomputable for op in kernels], dtype=np.bool_),
        read_ptr=_offsets(reads),
        read_idx=_flat(reads),
        write_ptr=_offsets(writes),
        write_idx=_flat(writes),
        nbytes=np.array(program.nbytes(), dtype=np.int64),
        producer=np.array([kernel_at.get(op, -1) for op in program.producer], dtype=np.int64),
        keep_to_end=keep,
        base_bytes=resident_bytes(program),
    )


def _needed(program: Program) -> list[Op]:
    """Ops that own bytes or have effects, without those whose results nobody needs."""
    wanted = set(program.kept)
    found = []
    for op in reversed(program.ops):
        if program.is_folded(op) or (op.is_input and op.region == "forward"):
            continue
        has_effects = op.mutates or op.is_random or op.is_collective
        if has_effects or op.is_input or wanted.intersection(program.allocates(op)):
            found.append(op)
            wanted.update(program.reads(op))
    return found[::-1]


def _offsets(rows: list[list[int]]) -> IntArray:
    return np.cumsum([0, *map(len, rows)], dtype=np.int64)


def _flat(rows: list[list[int]]) -> IntArray:
    return np.array([s for row in rows for s in row], dtype=np.int64)
