"""The options shared by `compile`, `plan` and the torch.compile backend, checked once so that bodies can trust them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

import torch

from fxmem.budget import Budget, resolve_budget
from fxmem.errors import OptionError
from fxmem.planners import get_planner
from fxmem.planners.plan import Plan
from fxmem.schedule.actions import TIERS, Tier

Inner = Literal["eager", "inductor"]


class OptionDict(TypedDict, total=False):
    """Keyword options; see `Settings` for each."""

    planner: str
    tiers: str | Sequence[str]
    offload_dir: str | Path | None
    inner: Inner
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[..., Any] | None
    dynamic: bool | None
    device_spec: str | Path | None
    solve_s: float | None
    plan: Plan | None


@dataclass(frozen=True)
class Settings:
    """Checked options.

    `budget`: see `fxmem.budget.Budget`. `planner`: a registered name. `tiers`: where saved tensors may be offloaded to.
    `offload_dir`: directory of the disk tier. `inner`: who runs the rewritten graph. `optimizer`: its state counts
    against the budget. `loss_fn`: called as loss_fn(output, target), target being the last argument of the step.
    `dynamic`: sizes of inputs are symbols (None: those that were seen to change).
    `device_spec`: plan for that machine (a preset or JSON file), not this one.
    `solve_s`: limit on the planner's work, in seconds of a reference core. `plan`: use this plan instead of making one.
    """

    budget: Budget = None
    planner: str = "auto"
    tiers: tuple[Tier, ...] = ()
    offload_dir: Path | None = None
    inner: Inner = "eager"
    optimizer: torch.optim.Optimizer | None = None
    loss_fn: Callable[..., Any] | None = None
    dynamic: bool | None = None
    device_spec: str | Path | None = None
    solve_s: float | None = None
    plan: Plan | None = None


NAMES = tuple(field.name for field in fields(Settings))


def settings(budget: Budget = None, **options: Any) -> Settings:
    """Check every option. Raises OptionError naming the choices."""
    for name in options:
        if name not in NAMES:
            raise OptionError(f"unknown option {name!r}{_hint(name, NAMES)}: choose from {', '.join(NAMES)}")
    resolve_budget(budget)
    made = Settings(budget=budget, **{**options, "tiers": _tiers(options.get("tiers"))})
    get_planner(made.planner)
    if made.inner not in get_args(Inner):
        raise OptionError(f"unknown inner {made.inner!r}: choose one of {', '.join(get_args(Inner))}")
    if made.optimizer is not None and not isinstance(made.optimizer, torch.optim.Optimizer):
        raise OptionError(f"optimizer must be a torch.optim.Optimizer, not {type(made.optimizer).__name__}")
    if made.loss_fn is not None and not callable(made.loss_fn):
        raise OptionError(f"loss_fn must be callable, not {type(made.loss_fn).__name__}")
    if made.solve_s is not None and not made.solve_s > 0:
        raise OptionError(f"solve_s must be a positive number of seconds, not {made.solve_s!r}")
    if made.plan is not None and not isinstance(made.plan, Plan):
        raise OptionError(f"plan must be an fxmem.Plan (fxmem.Plan.load reads one), not {type(made.plan).__name__}")
    return made


def _tiers(tiers: Any) -> tuple[Tier, ...]:
    if tiers is None:
        return ()
    if tiers == "auto":
        return TIERS
    names = (tiers,) if isinstance(tiers, str) else tuple(tiers)
    for name in names:
        if name not in TIERS:
            raise OptionError(f"unknown tier {name!r}: choose from {', '.join(TIERS)}, or 'auto' for all")
    return names


def _hint(name: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
