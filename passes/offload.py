"""`offload`: transfers of a plan as nodes of the joint graph, and the engine that runs them.

`Offload`, `Free`, `Reload`, `Wait` become `fxmem::offload`, `free`, `reload`, `wait` on the base tensor of the storage:
a storage moves once, whatever views of it are read, and views are made again from the tensor that came back.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.errors import VerifyError
from fxmem.ir.program import Program
from fxmem.passes.emit import Emitter, emits, region_of
from fxmem.runtime.transfers import ops
from fxmem.runtime.transfers.disk_file import shared_file
from fxmem.runtime.transfers.engine import Engine, Hook
from fxmem.runtime.transfers.layout import Layout, plan_layout
from fxmem.schedule.actions import Action, Free, Offload, Reload, Wait

RUNTIME = "offload runtime"
"""Key in `Emitter.state` of the number under which the engine is registered."""
MIN_BYTES = 64 << 10
"""Smaller storages cost more in latency than they give back."""

_OPS = torch.ops.fxmem


@dataclass(eq=False)
class Transfers:
    """The engine of one plan, known to its graph as `key` (0: nothing is offloaded). The graph's owner closes it."""

    key: int
    engine: Engine | None
    layout: Layout

    def retire(self) -> None:
        """Another plan took over: memory that idles goes back now, the rest when the steps in flight are over."""
        if self.engine is not None:
            self.engine.retire()

    def close(self) -> None:
        """Give host memory and disk back; the graph can't run any more. Idempotent."""
        if self.key:
            ops.release(self.key)
            self.key, self.engine = 0, None


def open_transfers(
    program: Program, actions: Sequence[Action], offload_dir: str | Path | None = None, hook: Hook | None = None
) -> Transfers:
    """The engine for the offloads in `actions`. Takes no memory and no file before the first step.

    `offload_dir`: folder of the disk tier (default: the system's for temporary files). `hook`: see `Engine`.
    Raises VerifyError if storages of several devices are offloaded.
    """
    moved = {action.storage for action in actions if isinstance(action, Offload)}
    if not moved:
        return Transfers(0, None, Layout())
    devices = {program.storages[storage].device or "cpu" for storage in moved}
    if len(devices) > 1:
        raise VerifyError(f"one plan offloads from several devices: {', '.join(sorted(devices))}")
    device = torch.device(devices.pop())
    layout = plan_layout(program, actions, staged=device.type == "cuda")
    file = shared_file(offload_dir or tempfile.gettempdir()) if layout.disk_bytes else None
    if device.type == "cuda":
        from fxmem.runtime.transfers.cuda import CudaEngine

        engine: Engine = CudaEngine(layout, device, file, hook)
    else:
        from fxmem.runtime.transfers.threads import ThreadEngine

        engine = ThreadEngine(layout, file, hook)
    return Transfers(ops.register(engine), engine, layout)


def why_not_offloadable(joint: JointGraph, program: Program, min_bytes: int = MIN_BYTES) -> dict[int, str]:
    """Storages that may not be offloaded, with the reason."""
    resident = set(program.resident)
    outputs = (*program.forward_outputs, *program.backward_outputs)
    returned = {storage for index in outputs for storage in program.ops[index].storages}
    written = {storage for op in program.ops for storage in op.mutates}
    nbytes = program.nbytes()
    states = {s for index in program.states for s in program.ops[index].storages}
    bases = _bases(joint, program)
    reasons: dict[int, str] = {}
    for storage in range(len(program.storages)):
        if storage in resident:
            reasons[storage] = "it is an input of the step, or a view of one, and stays on the device"
        elif storage in returned:
            reasons[storage] = "it is returned"
        elif storage in written:
            reasons[storage] = "it is written in place"
        elif storage in states:
            reasons[storage] = "it is the state of a random generator"
        elif nbytes[storage] < min_bytes:
            reasons[storage] = f"it is smaller than {min_bytes} bytes"
        elif (reason := _why_not_movable(bases[storage])) is not None:
            reasons[storage] = reason
    return reasons


def _why_not_movable(bases: Sequence[Any]) -> str | None:
    if len(bases) != 1:
        return f"{len(bases)} tensors of one op share it"
    (val,) = bases
    if not isinstance(val, torch.Tensor) or val.layout != torch.strided or compat.is_wrapper_subclass(val):
        return "it is not a dense tensor"
    if val.device.type not in ("cpu", "cuda"):
        return f"its device is {val.device}"
    if val.is_conj() or val.is_neg() or val.storage_offset() != 0:
        return "its base tensor is itself a view"
    return None


def _bases(joint: JointGraph, program: Program) -> list[list[Any]]:
    """For each storage, the fake values of the tensors that its producer makes in it."""
    bases: list[list[Any]] = [[] for _ in program.storages]
    nodes = joint.nodes
    for storage, producer in enumerate(program.producer):
        val = nodes[producer].meta.get("val")
        members = val if isinstance(val, (tuple, list)) else [val]
        mine = [m for m in members if isinstance(m, torch.Tensor)]
        if len(program.ops[producer].storages) > 1:
            keys = dict.fromkeys(compat.storage_key(m) for m in mine)
            position = program.ops[producer].storages.index(storage)
            wanted = list(keys)[position] if position < len(keys) else None
            mine = [m for m in mine if compat.storage_key(m) == wanted]
        bases[storage] = mine
    return bases


# emission


@dataclass(eq=False)
class _Slot:
    """What handlers know of an offloaded storage: its newest handle, its shape, the reload under way."""

    handle: fx.Node
    base: fx.Node
    size: list[Any]
    stride: list[Any]
    reload: fx.Node | None = None


@dataclass(eq=False)
class _Offloads:
    slots: dict[int, _Slot] = field(default_factory=dict)  # storage -> its present slot
    first: fx.Node | None = None  # the handle that began the step
    num_slots: int = 0
    freed: set[Any] = field(default_factory=set)  # fake storages whose bytes were given up


def _offloads(emitter: Emitter) -> _Offloads:
    found: _Offloads = emitter.state.setdefault(_Offloads, _Offloads())
    return found


def _handle_like(emitter: Emitter, node: fx.Node) -> Any:
    val = node.meta["val"]
    return val.new_empty((3,), dtype=torch.int64, device="cpu")


@emits(Offload)
def _emit_offload(emitter: Emitter, action: Offload) -> None:
    known, base = _offloads(emitter), emitter.current(action.storage)
    val = base.meta["val"]
    if (reason := _why_not_movable([val])) is not None:
        raise VerifyError(f"storage {action.storage} ({base.name}) can't be offloaded: {reason}")
    size = [_number(emitter, base, torch.ops.aten.sym_size.int, d, n) for d, n in enumerate(val.size())]
    stride = [_number(emitter, base, torch.ops.aten.sym_stride.int, d, n) for d, n in enumerate(val.stride())]
    args = (base, known.first, known.num_slots, emitter.state.get(RUNTIME, 0), 0, _extent(val), stride, val.dtype)
    handle = emitter.call(_OPS.offload.default, args, f"{base.name}_offload", _handle_like(emitter, base))
    known.first = known.first or handle
    known.num_slots += 1
    known.slots[action.storage] = _Slot(handle, base, size, stride)


@emits(Free)
def _emit_free(emitter: Emitter, action: Free) -> None:
    known, base = _offloads(emitter), emitter.current(action.storage)
    slot = _slot(known, action)
    args = (slot.handle, base)
    slot.handle = emitter.call(_OPS.free.default, args, f"{base.name}_free", _handle_like(emitter, base))
    known.freed.add(compat.storage_key(base.meta["val"]))


@emits(Reload)
def _emit_reload(emitter: Emitter, action: Reload) -> None:
    known = _offloads(emitter)
    slot = _slot(known, action)
    val = slot.base.meta["val"]
    after = _anchor(emitter, known)
    args = (slot.handle, slot.size, slot.stride, 0, val.dtype, val.device, [after] if after is not None else None)
    name = f"{slot.base.name}_reload"
    slot.reload = emitter.call(_OPS.reload.default, args, name, emitter.fresh_like(slot.base))


@emits(Wait)
def _emit_wait(emitter: Emitter, action: Wait) -> None:
    slot = _slot(_offloads(emitter), action)
    if slot.reload is None:
        raise VerifyError(f"storage {action.storage} is waited for, but no reload is under way")
    val = slot.reload.meta["val"]
    node = emitter.call(_OPS.wait.default, (slot.reload, slot.handle), f"{slot.base.name}_wait", val)
    slot.reload = None
    emitter.rebind(action.storage, node)


def _slot(known: _Offloads, action: Free | Reload | Wait) -> _Slot:
    if action.storage not in known.slots:
        raise VerifyError(f"{action}: storage {action.storage} was never offloaded")
    return known.slots[action.storage]


def _number(emitter: Emitter, base: fx.Node, target: Any, dim: int, value: Any) -> Any:
    """A size as an argument: the number, or for a symbolic one a node that reads it while the tensor is there."""
    if isinstance(value, int):
        return value
    return emitter.call(target, (base, dim), f"{base.name}_{target.__name__.split('.')[0]}", value)


def _extent(val: torch.Tensor) -> int:
    """Elements in the storage if its tensor does not reach the end of it, else -1 (known without a size)."""
    nbytes = val.untyped_storage().nbytes()
    if not isinstance(nbytes, int) or not all(isinstance(n, int) for n in (*val.size(), *val.stride())):
        return -1
    span = 1 + sum((n - 1) * s for n, s in zip(val.size(), val.stride(), strict=True)) if val.numel() else 0
    return nbytes // val.element_size() if nbytes > span * val.element_size() else -1


def _anchor(emitter: Emitter, known: _Offloads) -> fx.Node | None:
    """The newest result of this region: nothing has read it yet, so a reload that does makes no bytes live longer."""
    for node in reversed(emitter.graph.nodes):
        if node.op == "placeholder" or region_of(node) != emitter.region:
            return None
        val = node.meta.get("val")
        if node.op == "call_function" and isinstance(val, torch.Tensor) and not _is_transfer(node):
            return node if compat.storage_key(val) not in known.freed else None
    return None


def _is_transfer(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "namespace", "") == "fxmem"


# verification


def verify_offload(joint: JointGraph) -> None:
    """After `free` nobody reads the device bytes; each reload is waited for before anyone else reads it.

    Raises VerifyError naming the node.
    """
    nodes = joint.nodes
    position = {node: i for i, node in enumerate(nodes)}
    readers = dict(_reads(joint))
    for node in nodes:
        if node.target is _OPS.free.default:
            base = node.args[1]
            assert isinstance(base, fx.Node)
            reader = readers[compat.storage_key(base.meta["val"])]
            if position.get(reader, len(nodes)) > position[node]:
                raise VerifyError(f"{reader.name} reads {base.name}, whose bytes {node.name} gave up")
        if node.target is _OPS.reload.default:
            early = [user.name for user in node.users if user.target is not _OPS.wait.default]
            if early:
                raise VerifyError(f"{', '.join(early)} reads {node.name} without waiting for it")


def _reads(joint: JointGraph) -> Iterator[tuple[Any, fx.Node]]:
    """(fake storage, node) for every read, in execution order: the last one of a storage wins in a dict."""
    for node in joint.graph_module.graph.nodes:
        for source in node.all_input_nodes:
            val = source.meta.get("val")
            if isinstance(val, torch.Tensor) and val.layout == torch.strided:
                yield compat.storage_key(val), node
