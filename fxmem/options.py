"""The options shared by `compile`, `plan` and the torch.compile backend, checked once so that bodies can trust them."""

from __future__ import annotations

import difflib
import logging
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypedDict, get_args

import torch

from fxmem.analysis.devices import DeviceSpec, device_spec
from fxmem.analysis.doctor import offload_folder, why_unusable
from fxmem.budget import Budget, resolve_budget
from fxmem.errors import OptionError
from fxmem.planners import get_planner
from fxmem.planners.plan import Plan
from fxmem.schedule.actions import TIERS, Tier

Inner = Literal["eager", "inductor"]
Capture = Literal["dynamo", "trace"]
_LOGGER = logging.getLogger("fxmem")


class OptionDict(TypedDict, total=False):
    """Keyword options; see `Settings` for each."""

    planner: str
    tiers: str | Sequence[str]
    offload_dir: str | Path | None
    inner: Inner
    capture: Capture
    optimizer: torch.optim.Optimizer | None
    loss_fn: Callable[..., Any] | None
    dynamic: bool | None
    device_spec: str | Path | None
    solve_s: float | None
    plan: Plan | None


@dataclass(frozen=True)
class Settings:
    """Checked options.

    `budget`: see `fxmem.budget.Budget`. `planner`: a registered name. `tiers`: where saved tensors may be offloaded to
    ("auto": the host, and the disk if its folder can be used).
    `offload_dir`: folder of the disk tier. `inner`: who runs the rewritten graph.
    `capture`: "dynamo", or "trace" for models that break into many graphs (see `fxmem.capture.traced`).
    `optimizer`: its state counts against the budget. `loss_fn`: called as loss_fn(output, target), target being the
    last argument of the step.
    `dynamic`: sizes of inputs are symbols (None: those that were seen to change).
    `device_spec`: plan for that machine (a preset or JSON file), not this one.
    `solve_s`: limit on the planner's work, in seconds of a reference core. `plan`: use this plan instead of making one.
    """

    budget: Budget = None
    planner: str = "auto"
    tiers: tuple[Tier, ...] = ()
    offload_dir: str | Path | None = None
    inner: Inner = "eager"
    capture: Capture = "dynamo"
    optimizer: torch.optim.Optimizer | None = None
    loss_fn: Callable[..., Any] | None = None
    dynamic: bool | None = None
    device_spec: str | Path | None = None
    solve_s: float | None = None
    plan: Plan | None = None


NAMES = tuple(field.name for field in fields(Settings))


def settings(budget: Budget = None, **options: Any) -> Settings:
    """Check every option. Raises OptionError naming the choices, or what to do about a folder that can't be used."""
    for name in options:
        if name not in NAMES:
            raise OptionError(f"unknown option {name!r}{_hint(str(name), NAMES)}: choose from {', '.join(NAMES)}")
    resolve_budget(budget)
    made = Settings(budget=budget, **{**options, "tiers": _tiers(options.get("tiers"))})
    _check_types(made)
    get_planner(made.planner)
    if made.inner not in get_args(Inner):
        raise OptionError(f"unknown inner {made.inner!r}: choose one of {', '.join(get_args(Inner))}")
    if made.capture not in get_args(Capture):
        raise OptionError(f"unknown capture {made.capture!r}: choose one of {', '.join(get_args(Capture))}")
    if made.capture == "trace" and made.dynamic:
        raise OptionError('sizes as symbols need capture="dynamo": by capture="trace" every shape is captured anew')
    if made.solve_s is not None and not made.solve_s > 0:
        raise OptionError(f"solve_s must be a positive number of seconds, not {made.solve_s!r}")
    if made.device_spec is not None:
        device_spec(made.device_spec)
    return _with_disk_checked(made, asked=options.get("tiers"))


_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "planner": ((str,), "a planner's name"),
    "offload_dir": ((str, os.PathLike, NoneType), "a folder's path"),
    "optimizer": ((torch.optim.Optimizer, NoneType), "a torch.optim.Optimizer"),
    "loss_fn": ((Callable, NoneType), "callable"),  # type: ignore[dict-item]
    "dynamic": ((bool, NoneType), "True, False or None"),
    "device_spec": ((str, os.PathLike, DeviceSpec, NoneType), "a preset's name or a JSON file's path"),
    "solve_s": ((numbers.Real, NoneType), "a positive number of seconds"),
    "plan": ((Plan, NoneType), "an fxmem.Plan (fxmem.Plan.load reads one)"),
}


def _check_types(made: Settings) -> None:
    for name, (types, what) in _TYPES.items():
        value = getattr(made, name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise OptionError(f"{name} must be {what}, not {reprlib.repr(value)} ({type(value).__name__})")


def _tiers(tiers: Any) -> tuple[Tier, ...]:
    if tiers is None:
        return ()
    if isinstance(tiers, str):
        tiers = TIERS if tiers == "auto" else (tiers,)
    if not isinstance(tiers, Iterable):
        raise OptionError(f"tiers must be {', '.join(TIERS)}, a list of them, or 'auto' for all, not {tiers!r}")
    names = list(tiers)
    for name in names:
        if name not in TIERS:
            raise OptionError(f"unknown tier {name!r}: choose from {', '.join(TIERS)}, or 'auto' for all")
    return tuple(tier for tier in TIERS if tier in names)


def _with_disk_checked(made: Settings, asked: Any) -> Settings:
    """`made`, without the disk where "auto" was asked and it can't be used. Raises OptionError where it must be.

    Planning for another machine touches no disk here.
    """
    if made.offload_dir is not None and not made.tiers:
        raise OptionError('offload_dir is the folder of the disk tier: give tiers="disk" or tiers="auto" as well')
    if "disk" not in made.tiers or made.device_spec is not None:
        return made
    folder = offload_folder(made.offload_dir)
    why = why_unusable(folder)
    if why is None:
        return made
    if not (isinstance(asked, str) and asked == "auto"):
        raise OptionError(f"offload_dir {folder} can't be used: {why}")
    _LOGGER.warning("nothing is offloaded to disk: %s can't be used (%s)", folder, why)
    return replace(made, tiers=tuple(tier for tier in made.tiers if tier != "disk"))


def _hint(name: str, choices: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, choices, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
