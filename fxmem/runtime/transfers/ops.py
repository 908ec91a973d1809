"""`fxmem::offload`, `free`, `reload`, `wait`: transfers as nodes of a graph, ordered by data dependencies alone.

An op returns or takes a *handle*: a CPU tensor of three integers (runtime, step, slot) whose storage keeps the step
alive, through views, `detach` and autograd's saved tensors. When the last handle of a step dies, its room on the tiers
is free again. `x` is an argument of `free` so that no compiler ends its life, and uses its bytes again, while they are
copied. `wait` returns an alias of what `reload` returned. Of the tensors `after`, a reload reads nothing: it stays
below the ops that made them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fxmem.errors import OffloadError
from fxmem.runtime.transfers.engine import Engine, Step
from fxmem.runtime.transfers.worker import is_copying_thread

_LIBRARY = torch.library.Library("fxmem", "DEF")
_LIBRARY.define(
    "offload(Tensor x, Tensor? step, int slot, int runtime, int offset=0, int extent=-1, SymInt[]? stride=None, "
    "ScalarType? dtype=None) -> Tensor"
)
_LIBRARY.define("free(Tensor handle, Tensor x) -> Tensor")
_LIBRARY.define(
    "reload(Tensor handle, SymInt[] size, SymInt[] stride, int offset, ScalarType dtype, Device device, "
    "Tensor[]? after=None) -> Tensor"
)
_LIBRARY.define("wait(Tensor(a) x, Tensor handle) -> Tensor(a)")
for _name in ("offload", "free", "reload", "wait"):  # each is part of the plan, also one whose result nobody reads
    torch.fx.node.has_side_effect(getattr(torch.ops.fxmem, _name).default)

_ENGINES: dict[int, tuple[Engine, int]] = {}  # key -> engine, times opened
_KEYS = itertools.count(1)


def register(engine: Engine, key: int | None = None) -> int:
    """Make `engine` known to graphs under `key` (default: an unused number); returns the key.

    A key that is taken keeps its engine (`engine` is closed) and counts one more owner.
    """
    key = next(_KEYS) if key is None else key
    known, owners = _ENGINES.get(key, (engine, 0))
    if known is not engine:
        engine.close()
    _ENGINES[key] = known, owners + 1
    return key


def release(key: int) -> None:
    """One owner less; the last one's leaving closes the engine.

    May run in a finalizer, on whatever thread collects: on a copying thread, which closing waits for, another does it.
    """
    engine, owners = _ENGINES.get(key, (None, 0))
    if engine is not None and owners > 1:
        _ENGINES[key] = engine, owners - 1
    elif engine is not None:
        del _ENGINES[key]
        if is_copying_thread():
            threading.Thread(target=engine.close, name="fxmem-close").start()
        else:
            engine.close()


def engine_of(key: int) -> Engine:
    """Raises OffloadError if there is none (any more)."""
    if key not in _ENGINES:
        raise OffloadError(f"offload: no engine {key} in this process; compile the model again")
    return _ENGINES[key][0]


class _Token(np.ndarray[Any, np.dtype[np.int64]]):
    """A handle's memory: torch keeps this object, and so the step, as long as any tensor has the storage."""

    step: Step


def _handle(key: int, step: Step, slot: int) -> torch.Tensor:
    token = np.array([key, step.number, slot], dtype=np.int64).view(_Token)
    token.step = step
    return torch.from_numpy(token)


def _open(handle: torch.Tensor) -> tuple[Engine, Step, int, int]:
    key, number, slot = handle.tolist()
    engine = engine_of(key)
    return engine, engine.step(number), slot, key


def flat_bytes(x: torch.Tensor, offset: int = 0, extent: int = -1) -> torch.Tensor:
    """The bytes of `x`'s storage as flat uint8: `extent` elements from `offset` elements before x's first one.

    By default to x's last element. Everything between is included, whatever x's strides; never beyond the storage.
    """
    storage, itemsize = x.untyped_storage(), x.element_size()
    if extent < 0:
        extent = offset + (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0)
    start = max(0, (x.storage_offset() - offset) * itemsize)
    nbytes = min(extent * itemsize, storage.nbytes() - start)
    empty = torch.empty(0, dtype=torch.uint8, device=x.device)
    return empty.set_(storage, start, (nbytes,), (1,))


def laid_out(x: torch.Tensor, stride: Sequence[int] | None) -> torch.Tensor:
    """`x` if it has `stride` wherever that matters, else a copy that has: readers of the reload count on it.

    A compiler may have laid out `x` otherwise than the graph says. The copy takes device bytes that no plan knows of.
    """
    if stride is None or all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), stride, strict=True)):
        return x
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


def typed(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """`x` if it is of `dtype`, else a copy that is: some ops return another one than torch says (the statistics of a
    batch norm in bfloat16). Raises OffloadError where that would lose digits."""
    if dtype is None or x.dtype == dtype:
        return x
    if torch.promote_types(x.dtype, dtype) != dtype:
        raise OffloadError(f"offload: an op that should return {dtype} returned {x.dtype}: don't offload its result")
    return x.to(dtype)


@torch.library.impl(_LIBRARY, "offload", "CompositeExplicitAutograd")
def _offload(
    x: torch.Tensor,
    step: torch.Tensor | None,
    slot: int,
    runtime: int,
    offset: int = 0,
    extent: int = -1,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    engine = engine_of(runtime)
    current = engine.begin() if step is None else _open(step)[1]
    engine.offload(current, slot, flat_bytes(laid_out(typed(x, dtype), stride), offset, extent))
    return _handle(runtime, current, slot)


@torch.library.impl(_LIBRARY, "free", "CompositeExplicitAutograd")
def _free(handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    engine, step, slot, key = _open(handle)
    engine.free(step, slot)
    return _handle(key, step, slot)


@torch.library.impl(_LIBRARY, "reload", "CompositeExplicitAutograd")
def _reload(
    handle: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    after: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    engine, step, slot, _ = _open(handle)
    storage = engine.reload(step, slot).untyped_storage()
    return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, tuple(size), tuple(stride))


@torch.library.impl(_LIBRARY, "wait", "CompositeExplicitAutograd")
def _wait(x: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    engine, step, slot, _ = _open(handle)
    engine.wait(step, slot, x)
    return x.as_strided(x.shape, x.stride())  # `view_as` would change the strides of dimensions of one element


def _fake_offload(
    x: torch.Tensor,
    step: torch.Tensor | None,
    slot: int,
    runtime: int,
    offset: int = 0,
    extent: int = -1,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return torch.empty(3, dtype=torch.int64, device="cpu")


def _fake_free(handle: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(handle)


def _fake_reload(
    handle: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    after: Sequence[torch.Tensor] | None = None,
) -> torch.Tensor:
    if offset == 0:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    span = offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return torch.empty(span, dtype=dtype, device=device).as_strided(size, stride, offset)


def _fake_wait(x: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return x.as_strided(x.shape, x.stride())  # `view_as` would change the strides of dimensions of one element


for _name, _fake in (("offload", _fake_offload), ("free", _fake_free), ("reload", _fake_reload), ("wait", _fake_wait)):
    torch.library.register_fake(f"fxmem::{_name}", _fake, lib=_LIBRARY)
