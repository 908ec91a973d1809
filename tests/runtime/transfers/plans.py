"""Hand-made offload schedules: everything saved, with random transfers written in."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

from fxmem.capture import JointGraph
from fxmem.ir.program import Program
from fxmem.passes.offload import why_not_offloadable
from fxmem.planners.problem import reduce_program
from fxmem.schedule.actions import Action, Free, Offload, Reload, StartBackward, Tier, Wait
from fxmem.schedule.simulate import Link, Machine, reads_of, writes_of

MACHINE = Machine({"host": Link(1e9, 1e9), "disk": Link(1e8, 1e8)})


def full_plan(program: Program) -> tuple[Action, ...]:
    """Everything saved."""
    problem = reduce_program(program)
    return problem.actions(range(problem.num_kernels), problem.num_forward)


def saved_storages(program: Program, actions: Sequence[Action], joint: JointGraph, min_bytes: int = 1) -> list[int]:
    """Storages made in forward and read in backward that may be offloaded."""
    boundary = actions.index(StartBackward())
    made = {s for action in actions[:boundary] for s in writes_of(program, action)}
    read = {s for action in actions[boundary:] for s in reads_of(program, action)}
    return sorted((made & read) - why_not_offloadable(joint, program, min_bytes).keys())


def offload_plan(
    program: Program,
    actions: Sequence[Action],
    storages: Collection[int],
    tiers: Sequence[Tier],
    seed: int | None = None,
) -> tuple[Action, ...]:
    """`actions` with `storages` moved out and back.

    Without a seed: out at once, given up after the last forward read, back right before the first backward read. With
    one: random places between those, and now and then given up and reloaded again between two backward reads.
    """
    rng = random.Random(seed)
    boundary = actions.index(StartBackward())
    before: dict[int, list[Action]] = {}
    for storage in storages:
        born = next(i for i, a in enumerate(actions) if storage in writes_of(program, a))
        reads = [i for i, a in enumerate(actions) if storage in reads_of(program, a)]
        last = max([born, *(i for i in reads if i < boundary)])
        first = min(i for i in reads if i > boundary)
        out, free, reload = born + 1, last + 1, first
        if seed is not None:
            out = rng.randint(born + 1, last + 1)
            free = rng.randint(last + 1, first)
            reload = rng.randint(free, first)
        before.setdefault(out, []).append(Offload(storage, rng.choice(tiers)))
        before.setdefault(free, []).append(Free(storage))
        before.setdefault(reload, []).append(Reload(storage))
        before.setdefault(first, []).append(Wait(storage))
        for earlier, later in pairwise(reads):
            if seed is not None and earlier >= first and later > earlier + 1 and rng.random() < 0.3:
                before.setdefault(later, []).extend([Reload(storage), Wait(storage)])
    return tuple(_merged(actions, before))


def _merged(actions: Sequence[Action], before: dict[int, list[Action]]) -> Iterable[Action]:
    for i, action in enumerate(actions):
        yield from sorted(before.get(i, ()), key=_ORDER)
        yield action


def _ORDER(action: Action) -> int:  # noqa: N802
    return (Offload, Free, Reload, Wait).index(type(action))  # type: ignore[arg-type]
