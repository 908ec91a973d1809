"""The schedule that a model's own checkpoints ask for."""

from __future__ import annotations

import numpy as np

from fxmem.planners.kernel.binding import Kernel, State, mutated
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.search import solution
from fxmem.planners.registry import Solution


def checkpointed(problem: Problem) -> Solution | None:
    """What the model's own checkpoints ask for: their inner values are made again where backward needs them, everything
    else is saved; None for a model without any."""
    ops = [problem.program.ops[op] for op in problem.kernel_op[: problem.num_forward]]
    inner = {s for k, op in enumerate(ops) if op.hint and problem.recomputable[k] for s in problem.results[k]}
    cand = np.zeros(problem.num_storages, dtype=np.uint8)
    cand[list(inner)] = 1
    cand[problem.keep_to_end | mutated(problem)] = 0
    if not cand.any():
        return None
    return solution(Kernel(problem, cand), State(1 - cand), 0.0, {"why": "as the model's checkpoints ask"})
