"""Random valid schedules: a random part of forward is saved, the rest recomputed just in time and dropped again."""

from __future__ import annotations

import random

from fxmem.ir.program import Program
from fxmem.planners.problem import Problem, reduce_program
from fxmem.schedule.actions import Action


def random_plan(program: Program, seed: int, keep: float = 0.3, linger: float = 0.5) -> tuple[Action, ...]:
    """`keep`: chance that a forward result is saved. `linger`: chance that a recomputed one stays for later readers."""
    problem = reduce_program(program)
    rng = random.Random(seed)
    order = list(range(problem.num_forward))
    pinned = {k for k in order if not problem.recomputable[k] or problem.keep_to_end[problem.writes(k)].any()}
    saved = pinned | {k for k in order if rng.random() < keep}
    alive = {int(s) for k in saved for s in problem.writes(k)}
    for kernel in range(problem.num_forward, problem.num_kernels):
        _run(problem, kernel, alive, order)
        alive.update(map(int, problem.writes(kernel)))
        recomputed = {s for s in alive if 0 <= problem.producer[s] < problem.num_forward} - _writes(problem, saved)
        alive.difference_update(s for s in recomputed if rng.random() > linger)
    return problem.actions(order, problem.num_forward)


def full_plan(program: Program) -> tuple[Action, ...]:
    """Everything saved."""
    problem = reduce_program(program)
    return problem.actions(range(problem.num_kernels), problem.num_forward)


def _writes(problem: Problem, kernels: set[int]) -> set[int]:
    return {int(s) for k in kernels for s in problem.writes(k)}


def _run(problem: Problem, kernel: int, alive: set[int], order: list[int]) -> None:
    """Append `kernel` to `order` after whatever it reads that is not alive."""
    for storage in map(int, problem.reads(kernel)):
        if storage not in alive:
            producer = int(problem.producer[storage])
            _run(problem, producer, alive, order)
            alive.update(map(int, problem.writes(producer)))
    order.append(kernel)
