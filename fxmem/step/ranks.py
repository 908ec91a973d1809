"""One rank measures for all: what ranks of a process group measure differs, and so would their plans."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from fxmem import compat

Made = TypeVar("Made")

WAIT_S = 120.0
"""How long the others wait for the rank that came first; then each goes its own way."""


def made_once(key: str, make: Callable[[], Made]) -> Made:
    """`make()` of the rank that asked for `key` first; where there is no process group, one's own.

    No collective: a rank that asks alone, or again, waits for nobody. What is made must be picklable.
    """
    store = compat.default_store()
    if store is None or dist.get_world_size() == 1:
        return make()
    key = f"fxmem/{key}"
    if store.add(f"{key}/asked", 1) > 1:
        try:
            store.wait([key], timedelta(seconds=WAIT_S))
        except RuntimeError:  # the first is gone, or slower than anyone should be
            return make()
        found: Made | None = pickle.loads(store.get(key))
        return make() if found is None else found
    made: Made | None = None
    try:
        made = make()
    finally:
        store.set(key, pickle.dumps(made))
    return made
