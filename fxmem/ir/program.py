"""`Program`: ops in schedule order over storages, independent of torch.

A *storage* is whatever owns bytes; the tensors that are views of one another share one. An op lists the storages its
outputs live in; those that no earlier op listed are the ones it *allocates*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import sympy

from fxmem.errors import VerifyError
from fxmem.ir import sizes
from fxmem.units import format_bytes

Region = Literal["forward", "backward"]
Hint = Literal["", "recompute"]
Size: TypeAlias = int | sympy.Expr


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes with one owner. `nbytes` is an int, or a sympy expression when shapes are symbolic."""

    id: int
    nbytes: Size
    device: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """What an op of a split graph serves: part `number`, from 0, of the captured op `op`, in the region `region` of
    `Program.fissions`."""

    op: str
    number: int
    region: int

    def to_json(self) -> list[Any]:
        return [self.op, self.number, self.region]


@dataclass(frozen=True, slots=True)
class Op:
    """One node of the joint graph.

    `args`: indices of the ops whose outputs it takes. `storages`: ids of the storages its outputs live in (none for
    scalars). `mutates`: ids of storages it writes in place. `workspace_bytes`: allocated and released within the op,
    beyond its outputs. `recomputable`: running it twice gives the same values and changes nothing else.
    A random op is recomputable if its last argument is the state that it draws from: see `Program.state_op`.
    `hint`: "recompute" for a forward op inside a checkpoint of the model (what it is to keep is not recomputable).
    `fused`: of an op of a part whose gradients are made in forward: the region that it was captured in.
    `source`: the line of the model it comes from. `label`: what the model calls it (a parameter, the gradient of one).
    `module`: the path of the module it belongs to. `part`: of what, if it runs for one part of a split region.
    """

    index: int
    name: str
    target: str
    region: Region
    args: tuple[int, ...]
    storages: tuple[int, ...]
    is_input: bool = False
    seconds: float = 0.0
    workspace_bytes: int = 0
    mutates: tuple[int, ...] = ()
    is_random: bool = False
    is_collective: bool = False
    recomputable: bool = True
    hint: Hint = ""
    fused: Region | None = None
    source: str = ""
    label: str = ""
    module: str = ""
    part: Part | None = None

    @property
    def shown(self) -> str:
        """Its name for people."""
        return self.label or self.name

    @property
    def once(self) -> Op:
        """The same, never to run again: one that draws need not know what it drew from."""
        args = self.args[:-1] if self.is_random and self.recomputable else self.args
        return replace(self, args=args, recomputable=False)


@dataclass(frozen=True)
class Fission:
    """One region of a joint graph that runs in parts.

    `seed`: index of the node whose value, split along `dim`, the region grows from. `offsets`: borders of the parts on
    that dimension, from 0 to its size. `fuse`: the region's gradients are made in forward, part by part. `min_bytes`:
    smaller values are not drawn in.
    """

    seed: int
    dim: int
    offsets: tuple[int, ...]
    fuse: bool = False
    min_bytes: int = 0

    @property
    def num_parts(self) -> int:
        return len(self.offsets) - 1

    @property
    def size(self) -> int:
        """Of the seed along `dim`."""
        return self.offsets[-1]

    def to_json(self) -> list[Any]:
        return [self.seed, self.dim, list(self.offsets), self.fuse, self.min_bytes]

    @classmethod
    def from_json(cls, data: Any) -> Fission:
        seed, dim, offsets, fuse, min_bytes = data
        return cls(seed, dim, tuple(offsets), fuse, min_bytes)


@dataclass(frozen=True)
class Program:
    """A training step in captured order, which respects dependencies.

    No forward op depends on a backward one: all of forward can run before backward starts. An input of the backward
    region is a tangent, the gradient of a forward output. `forward_outputs`, `backward_outputs`: indices of ops whose
    values are returned (they stay alive to the end). `static`: indices of the inputs that are parameters or buffers.
    `hints`: the value of every size symbol seen at capture. `extra_resident_bytes`: bytes that stand on the device
    throughout without being an input (existing gradients, optimizer state). `graph`: fingerprint of the captured graph.
    `released`: forward outputs that nobody holds any more when backward starts. `fissions`: how the graph was split
    (of a step of several graphs: how each of them was); `unsplit`: what it was before, which figures are compared with.
    `gap_bytes`: of what others are taken to need between forward and backward; see `with_gap`.
    """

    name: str
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    forward_outputs: tuple[int, ...]
    backward_outputs: tuple[int, ...]
    static: tuple[int, ...] = ()
    hints: Mapping[str, int] = field(default_factory=dict)
    extra_resident_bytes: int = 0
    graph: str = ""
    released: tuple[int, ...] = ()
    fissions: tuple[Fission, ...] = ()
    unsplit: Program | None = field(default=None, repr=False)
    gap_bytes: int = 0

    def __post_init__(self) -> None:
        verify_program(self)

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each storage, the index of the op that allocates it."""
        owner = [-1] * len(self.storages)
        for op in self.ops:
            for storage in op.storages:
                if owner[storage] < 0:
                    owner[storage] = op.index
        return tuple(owner)

    def allocates(self, op: Op) -> tuple[int, ...]:
        """Storages that `op` creates (the others it lists are those of its arguments: it is a view of them)."""
        return self._allocates[op.index]

    @cached_property
    def _allocates(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s for s in op.storages if self.producer[s] == op.index) for op in self.ops)

    def reads(self, op: Op) -> tuple[int, ...]:
        """Storages that must hold their values when `op` runs, in argument order, each once."""
        return self._reads[op.index]

    @cached_property
    def _reads(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(dict.fromkeys(s for arg in op.args for s in self.ops[arg].storages)) for op in self.ops)

    def state_op(self, op: Op) -> Op | None:
        """The op that reads the generator's state before the recomputable random `op` draws; None for other ops.

        Only a second run of `op` reads that state, to draw the same again; without one it need not be read at all.
        """
        return self.ops[op.args[-1]] if op.is_random and op.recomputable else None

    @cached_property
    def states(self) -> frozenset[int]:
        """Indices of the ops that read a generator's state for a random op."""
        return frozenset(state.index for op in self.ops if (state := self.state_op(op)) is not None)

    def is_folded(self, op: Op) -> bool:
        """Views, getitems and scalar ops: no bytes of their own, re-derived from their base wherever needed."""
        return not (op.is_input or self.allocates(op) or op.mutates or op.is_random or op.is_collective)

    def nbytes(self, values: Mapping[str, int] | None = None) -> list[int]:
        """Bytes of every storage, with size symbols set to `values` (default: the hints)."""
        return [sizes.evaluate(s.nbytes, self.hints if values is None else values) for s in self.storages]

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """Storages of forward inputs: on the device before, during and after the step."""
        return tuple(dict.fromkeys(s for op in self.ops if op.is_input and op.region == "forward" for s in op.storages))

    @cached_property
    def kept(self) -> frozenset[int]:
        """Storages that stay to the end once they are there: what is returned, and tangents (autograd holds them)."""
        tangents = (op.index for op in self.ops if op.is_input and op.region == "backward")
        held = (index for index in self.forward_outputs if index not in self.released)
        returned = (*held, *self.backward_outputs, *tangents)
        return frozenset(s for index in returned for s in self.ops[index].storages)

    @property
    def tangents(self) -> frozenset[int]:
        """Storages of the gradients that backward is given."""
        return frozenset(s for op in self.ops if op.is_input and op.region == "backward" for s in op.storages)

    @cached_property
    def reference(self) -> Program:
        """What a plan's figures are compared with: this program, before it was split if it was."""
        return self if self.unsplit is None else self.unsplit.standing_as(self)

    def standing_as(self, other: Program) -> Program:
        """This form of the graph where `other`, another form of it, stands: beside the same bytes, the same outputs
        released."""
        released = tuple(self.forward_outputs[other.forward_outputs.index(op)] for op in other.released)
        found = replace(self, extra_resident_bytes=other.extra_resident_bytes, released=released)
        return found.with_gap(other.gap_bytes)

    def with_gap(self, nbytes: int) -> Program:
        """The same, with `gap_bytes`: a workspace of the last op of forward that makes an output."""
        owners = [self.producer[s] for i in self.forward_outputs for s in self.ops[i].storages]
        last = max((i for i in owners if not self.ops[i].is_input), default=None)
        if last is None or nbytes == self.gap_bytes:
            return self
        op = self.ops[last]
        wider = replace(op, workspace_bytes=op.workspace_bytes + nbytes - self.gap_bytes)
        return replace(self, ops=(*self.ops[:last], wider, *self.ops[last + 1 :]), gap_bytes=nbytes)

    @property
    def is_symbolic(self) -> bool:
        return any(not isinstance(s.nbytes, int) for s in self.storages)

    @cached_property
    def fingerprint(self) -> str:
        """Of the captured graph, or else a hash of structure and sizes: equal if schedules are interchangeable."""
        if self.graph:
            return self.graph
        parts = [
            [
                (op.target if not op.is_input else "input", op.region, op.args, op.storages, op.recomputable)
                for op in self.ops
            ],
            [sizes.to_json(s.nbytes) for s in self.storages],
            [self.forward_outputs, self.backward_outputs],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def with_costs(self, seconds: list[float], workspace_bytes: list[int]) -> Program:
        """The same program with measured or estimated cost per op (seconds, bytes)."""
        ops = (
            replace(op, seconds=s, workspace_bytes=w)
            for op, s, w in zip(self.ops, seconds, workspace_bytes, strict=True)
        )
        return replace(self, ops=tuple(ops))

    def at(self, values: Mapping[str, int]) -> Program:
        """The same program with other values as hints; costs of an op are scaled with its `scale_storage`."""
        if not values or dict(values) == dict(self.hints):
            return self
        old, new = self.nbytes(), self.nbytes(values)
        by = [self.scale_storage(op, old) for op in self.ops]
        scaled = self.with_costs(
            [op.seconds if s is None else op.seconds * new[s] / old[s] for op, s in zip(self.ops, by, strict=True)],
            [
                op.workspace_bytes if s is None else -(-op.workspace_bytes * new[s] // old[s])
                for op, s in zip(self.ops, by, strict=True)
            ],
        )
        return replace(scaled, hints=dict(values), unsplit=self.unsplit and self.unsplit.at(values))

    def scale_storage(self, op: Op, nbytes: list[int]) -> int | None:
        """The largest storage of symbolic size that `op` reads or writes: its costs are taken to grow in proportion.

        `nbytes`: of every storage at the hints. None if only fixed sizes are involved.
        """
        touched = dict.fromkeys((*op.storages, *self.reads(op)))
        symbolic = [s for s in touched if nbytes[s] and not isinstance(self.storages[s].nbytes, int)]
        return max(symbolic, key=lambda s: nbytes[s], default=None)

    @property
    def shown(self) -> str:
        """Which one it is, for people: name, fingerprint, size, and where in the model it starts."""
        start = next((op.source for op in self.ops if op.source), "")
        return f"{self.name} [{self.fingerprint}], {len(self.ops)} ops{f', from {start}' if start else ''}"

    def __repr__(self) -> str:
        """One line; `str` has the ops."""
        return f"<Program {self.name} [{self.fingerprint}]: {len(self.ops)} ops, {len(self.storages)} storages>"

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ops": [_op_to_json(op) for op in self.ops],
            "sizes": [sizes.to_json(s.nbytes) for s in self.storages],
            "devices": [s.device for s in self.storages],
            "fw_outputs": list(self.forward_outputs),
            "bw_outputs": list(self.backward_outputs),
            "static": list(self.static),
            "hints": dict(self.hints),
            "extra_resident_bytes": self.extra_resident_bytes,
            "graph": self.graph,
            "released": list(self.released),
            **({"fissions": [f.to_json() for f in self.fissions]} if self.fissions else {}),
            **({"unsplit": self.unsplit.to_json()} if self.unsplit is not None else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Program:
        """Inverse of `to_json`; also reads captured instances, which lack the optional keys."""
        devices = data.get("devices") or [""] * len(data["sizes"])
        return cls(
            name=data["name"],
            ops=tuple(_op_from_json(i, op) for i, op in enumerate(data["ops"])),
            storages=tuple(
                Storage(i, sizes.from_json(size), device)
                for i, (size, device) in enumerate(zip(data["sizes"], devices, strict=True))
            ),
            forward_outputs=tuple(dict.fromkeys(data["fw_outputs"])),
            backward_outputs=tuple(dict.fromkeys(data["bw_outputs"])),
            static=tuple(data["static"]),
            hints=dict(data.get("hints", {})),
            extra_resident_bytes=data.get("extra_resident_bytes", 0),
            graph=data.get("graph", ""),
            released=tuple(data.get("released", ())),
            fissions=tuple(map(Fission.from_json, data.get("fissions", ()))),
            unsplit=cls.from_json(data["unsplit"]) if "unsplit" in data else None,
        )

    @classmethod
    def load(cls, path: str | Path) -> Program:
        return cls.from_json(json.loads(Path(path).read_text()))


_IMPURE_TARGETS = ("rand", "dropout", "bernoulli")  # the instances' own convention; captured graphs carry tags instead
_REGION_OF: dict[str, Region] = {"fw": "forward", "bw": "backward"}
_PHASE_OF: dict[Region, str] = {region: phase for phase, region in _REGION_OF.items()}


def _op_to_json(op: Op) -> dict[str, Any]:
    return {
        "name": op.name,
        "target": op.target,
        "kind": "input" if op.is_input else "op",
        "phase": _PHASE_OF[op.region],
        "time": op.seconds,
        "args": list(op.args),
        "storages": list(op.storages),
        "workspace": op.workspace_bytes,
        "mutates": list(op.mutates),
        "random": op.is_random,
        "collective": op.is_collective,
        "recomputable": op.recomputable,
        "hint": op.hint,
        **({"fused": _PHASE_OF[op.fused]} if op.fused else {}),
        "source": op.source,
        "label": op.label,
        "module": op.module,
        **({"part": op.part.to_json()} if op.part else {}),
    }


def _op_from_json(index: int, data: Mapping[str, Any]) -> Op:
    is_random = data.get(
        "random", any(word in data["target"] for word in _IMPURE_TARGETS) and "backward" not in data["target"]
    )
    return Op(
        index=index,
        name=data["name"],
        target=data["target"],
        region=_REGION_OF[data["phase"]],
        args=tuple(data["args"]),
        storages=tuple(data["storages"]),
        is_input=data["kind"] == "input",
        seconds=data["time"],
        workspace_bytes=data.get("workspace", 0),
        mutates=tuple(data.get("mutates", ())),
        is_random=is_random,
        is_collective=data.get("collective", False),
        recomputable=data.get("recomputable", not is_random),
        hint=data.get("hint", ""),
        fused=_REGION_OF.get(data.get("fused", "")),
        source=data.get("source", ""),
        label=data.get("label", ""),
        module=data.get("module", ""),
        part=Part(*data["part"]) if "part" in data else None,
    )


def _lines(program: Program) -> Iterator[str]:
    yield f"program {program.name} [{program.fingerprint}] {len(program.ops)} ops, {len(program.storages)} storages"
    for op in program.ops:
        creates = set(program.allocates(op))
        owned = ", ".join(
            f"s{s}:{_show(program.storages[s].nbytes)}" if s in creates else f"&s{s}" for s in op.storages
        )
        flags = "".join(
            f" !{word}"
            for word, on in (("random", op.is_random), ("mutates", op.mutates), ("collective", op.is_collective))
            if on
        )
        args = ", ".join(f"%{a}" for a in op.args)
        yield f"  {op.region[0]} %{op.index} {op.name} = {op.target}({args}) -> [{owned}]{flags}"
    yield f"  forward outputs {list(program.forward_outputs)}, backward outputs {list(program.backward_outputs)}"


def _show(nbytes: Size) -> str:
    return format_bytes(nbytes) if isinstance(nbytes, int) else str(nbytes)


def _has_state(program: Program, op: Op) -> bool:
    """Is the last argument of `op` drawn in turn (so before `op`, once), from nothing, into a storage of its own?"""
    state = program.ops[op.args[-1]] if op.args else None
    return state is not None and state.is_random and not state.recomputable and not state.args and bool(state.storages)


def verify_program(program: Program) -> None:
    """Raise VerifyError unless indices, order, regions, storages and outputs are consistent."""

    def check(condition: bool, message: str) -> None:
        if not condition:
            raise VerifyError(f"program {program.name}: {message}")

    num_storages = len(program.storages)
    check(all(s.id == i for i, s in enumerate(program.storages)), "storage ids must equal their positions")
    for position, op in enumerate(program.ops):
        check(op.index == position, f"op {op.name} has index {op.index} at position {position}")
        check(all(0 <= a < position for a in op.args), f"op {op.name} uses a later op")
        check(all(0 <= s < num_storages for s in (*op.storages, *op.mutates)), f"op {op.name} names an unknown storage")
        check(
            not (op.recomputable and (op.mutates or op.is_collective)), f"op {op.name} has effects but is recomputable"
        )
        check(
            not (op.recomputable and op.is_random) or _has_state(program, op),
            f"op {op.name} is random and recomputable, but its last argument is no state to draw from",
        )
        on_backward = [program.ops[a].name for a in op.args if program.ops[a].region == "backward"]
        check(op.region == "backward" or not on_backward, f"forward op {op.name} depends on backward's {on_backward}")
        check(op.seconds >= 0 and op.workspace_bytes >= 0, f"op {op.name} has a negative cost")
    check(-1 not in program.producer, "a storage is never produced")
    num_ops = len(program.ops)
    check(
        all(0 <= o < num_ops for o in (*program.forward_outputs, *program.backward_outputs)), "an output is not an op"
    )
    check(
        all(program.ops[o].region == "forward" for o in program.forward_outputs), "a forward output is made in backward"
    )
