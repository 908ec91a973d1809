"""A word on optimizers that nobody named: their state stands on the device, and no budget counts it."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fxmem.step.resident import optimizer_bytes
from fxmem.step.standing import Standing
from fxmem.units import format_bytes

_SHARE = 0.01  # of the budget: less is not worth a word
_LOGGER = logging.getLogger("fxmem")
_watched: weakref.WeakKeyDictionary[Standing, int] = weakref.WeakKeyDictionary()


def watch(standing: Standing, budget_bytes: int) -> None:
    """Say once if an optimizer that `standing` doesn't count trains its parameters with a state that is no trifle."""
    _listen()
    _watched[standing] = budget_bytes


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _watched:
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for standing, budget_bytes in list(_watched.items()):
        if trained.isdisjoint(map(id, standing.parameters)):
            continue
        del _watched[standing]
        nbytes = 0 if standing.counts(optimizer) else optimizer_bytes(optimizer)
        if nbytes > _SHARE * budget_bytes:
            _LOGGER.warning(
                "the state of %s, %s, stands beside the budget of %s: it counts if fxmem.compile is given optimizer=",
                type(optimizer).__name__, format_bytes(nbytes), format_bytes(budget_bytes),
            )  # fmt: skip
