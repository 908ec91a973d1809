"""From a captured graph to its plan: program, costs, machine, planner."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.console import Console

from fxmem import compat
from fxmem.analysis import cost
from fxmem.analysis.doctor import machine
from fxmem.budget import Budget
from fxmem.capture import JointGraph
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.passes.offload import why_not_offloadable
from fxmem.planners import Options
from fxmem.planners.plan import STAYS, Plan, make_plan
from fxmem.planners.problem import reduce_program
from fxmem.planners.stakes import default_limit_s
from fxmem.schedule import Action, Machine
from fxmem.step.joined import Joined
from fxmem.step.ranks import made_once

_MANY = 1.5  # times the ops: a loss region adds few of them, the whole step a multiple


def annotated_program(joint: JointGraph, settings: Settings, may_run: bool) -> Program:
    """The graph as a Program with seconds and workspace of every op, on this device or on `device_spec`.

    Without `may_run` nothing is measured: costs are those measured before, or estimates. In a process group the rank
    that has the graph first measures for all, so that all make the same plan of it.
    """
    program = replace(program_from_joint(joint), graph=joint.fingerprint)
    if settings.device_spec is not None or not may_run:
        return cost.annotate(program, joint.graph_module, settings.device_spec, limit_s=0.0)
    key = f"costs/{joint.fingerprint}/{sorted(program.hints.items())}"
    return made_once(key, functools.partial(cost.find_costs, program, joint.graph_module)).apply(program)


Start = tuple[Action, ...] | None
"""The actions of a plan of the same graph, for other sizes or another budget, from which the search begins."""


def plan_form(
    program: Program, joint: JointGraph, settings: Settings, budget: Budget, share: float = 1.0, start: Start = None
) -> Plan:
    """Plan `program`, the graph `joint` with its costs and what stands beside it, with a `share` of the usual work.

    Raises BudgetInfeasible.
    """
    options = planner_options(program, settings, share, start)
    stays = why_not_offloadable(joint, program, min_bytes=1) if options.tiers else {}
    options = replace(options, pinned=frozenset(stays))
    plan = make_plan(program, budget, settings.planner, options)
    return replace(plan, joint=joint, notes={**plan.notes, **({STAYS: _by_json_key(stays)} if stays else {})})


def plan_joined(
    joined: Joined,
    joints: Sequence[JointGraph],
    settings: Settings,
    budget: Budget,
    share: float = 1.0,
    start: Start = None,
) -> Plan:
    """Plan the graphs of a step together. Raises BudgetInfeasible.

    With several calls nothing is offloaded: a graph can't give up or take back bytes while another one runs.
    """
    if settings.tiers and len(joints) > 1:
        settings = replace(settings, tiers=(), planner="auto")
    options = planner_options(joined.program, settings, share, start)
    if options.tiers:
        stays = why_not_offloadable(joints[0], joined.parts[0].program, min_bytes=1)
        free = {s for s, (_, own) in joined.storage_of.items() if own not in stays}
        options = replace(options, pinned=frozenset(range(len(joined.program.storages))) - free)
    return make_plan(joined.program, budget, settings.planner, options)


def _by_json_key(stays: Mapping[int, str]) -> dict[str, str]:
    """JSON has no numbers for keys."""
    return {str(storage): reason for storage, reason in stays.items()}


def planner_options(program: Program, settings: Settings, share: float = 1.0, start: Start = None) -> Options:
    """What the planner may use: tiers with the bandwidths of this machine or of `device_spec`, time, progress.

    `share` of the usual work: of what the user allowed, or of what `auto` takes by itself.
    """
    with compat.no_modes():  # bandwidths are measured on real memory, also while Dynamo's fake tensors are in force
        links = machine(settings.tiers, settings.offload_dir, settings.device_spec) if settings.tiers else Machine()
    solve_s = settings.solve_s
    if share < 1.0:
        solve_s = share * (default_limit_s(reduce_program(program)) if solve_s is None else solve_s)
    certify = program.unsplit is None or (share == 1.0 and not _is_written_out(program))
    progress = _progress(program.name)
    return Options(
        certify=certify, solve_s=solve_s, tiers=settings.tiers, machine=links, progress=progress, start=start
    )


def _is_written_out(program: Program) -> bool:
    """Was the graph split into so many parts alike that a solver would be lost among them?"""
    return program.unsplit is not None and len(program.ops) > _MANY * len(program.unsplit.ops)


def _progress(name: str) -> Callable[[float, str], None]:
    """Says on a terminal's stderr what the planner does, once it has taken more than a second."""
    console = Console(stderr=True)
    last_s = 0.0

    def show(spent_s: float, message: str) -> None:
        nonlocal last_s
        if console.is_terminal and spent_s > 1 and time.monotonic() - last_s > 0.5:
            last_s = time.monotonic()
            console.print(f"fxmem: planning {name}: {spent_s:.0f} s, {message}")

    return show
