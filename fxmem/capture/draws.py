"""Random ops that may run again with the same draws.

`fxmem::rng_state` reads the generator's state right before such an op draws; `replay` sets that state, runs the op once
more and leaves the generator as it was. The two have nothing in common with the op's arguments, so the graph's edges
don't tell which state is whose: the op's metadata names it (`state_name`). A state that no second run asks for is never
read at all: emission leaves it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.effects import is_collective, is_pure, is_random
from fxmem.capture.overwritten import written_args

_STATE = "fxmem_rng_state"
_LIBRARY = torch.library.Library("fxmem", "FRAGMENT")
_LIBRARY.define("rng_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _read(device: torch.device) -> torch.Tensor:
    return _generator(device).get_state()


_LIBRARY.impl("rng_state", _read, "CompositeExplicitAutograd")
RNG_STATE = torch.ops.fxmem.rng_state.default
"""device -> its default generator's state (uint8, on the CPU). Tagged random: it stands where it is among the draws."""


def _fake(device: torch.device) -> torch.Tensor:
    return torch.empty(_state_bytes(device.type), dtype=torch.uint8)


torch.library.register_fake("fxmem::rng_state", _fake, lib=_LIBRARY)


def replay(state: torch.Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)` with the draws that follow `state`; the generator of `device` is left as it was."""
    with draw_after(state, device):
        return op(*args, **kwargs)


@contextlib.contextmanager
def draw_after(state: torch.Tensor, device: torch.device) -> Iterator[None]:
    """What is drawn inside follows `state`; the generator of `device` is left as it was.

    What is put aside meanwhile is no tensor: on the CPU a replayed op itself takes more bytes than the state, so a plan
    for the op's own holds.
    """
    generator = _generator(device)
    present = state_of(device)
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(torch.from_numpy(present))


def state_of(device: torch.device) -> Any:
    """The state of `device`'s default generator as a numpy array: no bytes of torch's allocator."""
    return _generator(device).get_state().numpy().copy()


def drawing_devices(nodes: Iterable[fx.Node]) -> frozenset[torch.device]:
    """The devices whose default generators `nodes` draw from."""
    drawing = (node for node in nodes if is_random(node) and node.target is not RNG_STATE)
    return frozenset(t.device for node in drawing for t in compat.tensors_of(node) if t.device.type in ("cpu", "cuda"))


def save_states(graph: fx.Graph, forward: Sequence[fx.Node]) -> int:
    """Put a `RNG_STATE` node before every op of `forward` that can be replayed; returns how many."""
    num_states = 0
    for node in forward:
        device = _drawing_device(node)
        if device is None:
            continue
        with graph.inserting_before(node):
            state = graph.create_node("call_function", RNG_STATE, (device,), name=f"{node.name}_rng_state")
        mode = next(t.fake_mode for t in compat.tensors_of(node) if isinstance(t, compat.FakeTensor))
        with mode:
            state.meta = {"val": _fake(device), "partitioner_tag": "is_forward"}
        node.meta[_STATE] = state.name
        num_states += 1
    return num_states


def state_name(node: fx.Node) -> str | None:
    """Name of the node that reads the state from which `node` draws; None if it may be drawn only once."""
    name: str | None = node.meta.get(_STATE)
    return name


def _drawing_device(node: fx.Node) -> torch.device | None:
    """The device whose default generator `node` draws from, if running it again from that state gives the same.

    None also where that would save nothing: a state takes more bytes than the results.
    """
    if not is_random(node) or is_collective(node) or not is_pure(node) or written_args(node):
        return None
    if takes_generator(node):
        return None
    results = compat.tensors_of(node)
    devices = {t.device for t in results}
    if len(devices) != 1 or not all(isinstance(t, compat.FakeTensor) for t in results):
        return None
    (device,) = devices
    nbytes = sum(compat.hint(n) for n in {compat.storage_key(t): compat.storage_nbytes(t) for t in results}.values())
    return device if device.type in ("cpu", "cuda") and nbytes > _state_bytes(device.type) else None


def takes_generator(node: fx.Node) -> bool:
    """Is it given a generator of the model's own to draw from?"""
    return any(isinstance(argument, torch.Generator) for argument in compat.tree_leaves((node.args, node.kwargs)))


@cache
def _state_bytes(kind: str) -> int:
    return int(torch.default_generator.get_state().numel()) if kind == "cpu" else 16


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
