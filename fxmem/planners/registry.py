"""The registry: a planner is a function `(Problem, budget_bytes, Options) -> Solution` with a name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxmem.errors import OptionError
from fxmem.planners.effort import Effort
from fxmem.planners.problem import Problem
from fxmem.schedule.actions import Action, Tier
from fxmem.schedule.simulate import Machine


@dataclass(frozen=True)
class Options:
    """What every planner may use.

    `solve_s`: limit on the work, in seconds of a reference core (None: the planner's own choice); `effort` counts it.
    `tiers`: where bytes may be offloaded to. `machine`: links of those tiers. `pinned`: storages that may not be
    offloaded. `progress`: called with (seconds spent, message) now and then. `start`: a plan of a program like this one
    (its actions, or the storages that it saves), from which the search begins; it then takes `start_share` of the
    effort that it would choose itself.
    """

    solve_s: float | None = None
    tiers: tuple[Tier, ...] = ()
    machine: Machine = field(default_factory=Machine)
    pinned: frozenset[int] = frozenset()
    seed: int = 0
    start: tuple[Action, ...] | frozenset[int] | None = None
    start_share: float = 0.25
    progress: Callable[[float, str], None] | None = None
    certify: bool = True
    effort: Effort = field(default_factory=Effort, repr=False, compare=False)


@dataclass(frozen=True)
class Solution:
    """A planner's answer: actions (the simulator judges them), a lower bound, and notes for the report.

    `lower_bound_s`: no plan under the budget adds fewer seconds (0.0 if nothing is known).
    """

    actions: tuple[Action, ...]
    lower_bound_s: float = 0.0
    notes: Mapping[str, Any] = field(default_factory=dict)


def by_speed(options: Options) -> list[Tier]:
    """The tiers that may be used and that the machine has, fastest first."""
    links = options.machine.links
    found = [tier for tier in options.tiers if tier in links]
    return sorted(found, key=lambda tier: -min(links[tier].in_bytes_per_s, links[tier].out_bytes_per_s))


Planner = Callable[[Problem, int, Options], Solution]
PLANNERS: dict[str, Planner] = {}
# modules that register planners when imported
_MODULES = ("recompute.simple", "auto", "recompute.exact", "chains.graph_plan", "offload.search")


def register(name: str) -> Callable[[Planner], Planner]:
    """Class the decorated function under `name`."""

    def wrap(planner: Planner) -> Planner:
        PLANNERS[name] = planner
        return planner

    return wrap


def get_planner(name: str) -> Planner:
    """The planner called `name`. Raises OptionError naming the choices."""
    for module in _MODULES:
        try:
            importlib.import_module(f"fxmem.planners.{module}")
        except ModuleNotFoundError as error:
            if error.name != f"fxmem.planners.{module}":
                raise
    if name not in PLANNERS:
        raise OptionError(f"unknown planner {name!r}: choose one of {', '.join(sorted(PLANNERS))}")
    return PLANNERS[name]
