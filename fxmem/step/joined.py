"""The graphs of one step as one `Program`: planned together, they share the budget as the step's bytes fall.

A step calls graphs one after the other, then their backwards run. What earlier calls save stands under later ones;
what code between them holds or needs (the loss outside of the model, eager parts) was measured and stands as `Beside`.
The joined program has the ops of every call's forward in the order of the calls, then those of the backwards, and
between them *marks*: ops of no time, with an effect so that no planner drops or repeats them, which hold what must
live to that point.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fxmem.ir.program import Op, Program, Region, Storage
from fxmem.ir.program import Part as SplitPart
from fxmem.schedule import Action, Compute, Recompute, StartBackward

Segment = tuple[Region, int]
"""One call's forward or backward."""


@dataclass(frozen=True)
class Made:
    """A value that another call of the step returned: number `output` of its program's forward outputs."""

    call: int
    output: int


@dataclass(frozen=True)
class Part:
    """One call of a graph. Sizes of `program` are numbers.

    `origins`: storage of a forward input -> `Made`, or a key that names what stood before the step began (a parameter
    has the same key in every call); left out: made between the calls. `gradients`: number of a backward output ->
    storage of the input that it is the gradient of. `dropped`: numbers of the forward outputs that nobody holds any
    more when backward starts. All of it is the same however the graph was split. `kept`: of a call whose backward never
    comes, the ops whose results wait for it to the end of forward; such a call runs as it did.
    """

    program: Program
    origins: Mapping[int, Made | Hashable]
    gradients: Mapping[int, int]
    dropped: frozenset[int] = frozenset()
    kept: frozenset[int] | None = None

    @property
    def has_backward(self) -> bool:
        return self.kept is None


@dataclass(frozen=True)
class Beside:
    """Measured bytes beside the parts: `throughout`, `during` a segment above that, and at the most `before` it."""

    throughout: int = 0
    during: Mapping[Segment, int] = field(default_factory=dict)
    before: Mapping[Segment, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Joined:
    """`where[op]`: (call, op of its program), or None for a mark. `first`, `last`: marks around each segment."""

    parts: Sequence[Part]
    program: Program
    where: tuple[tuple[int, int] | None, ...]
    storage_of: Mapping[int, tuple[int, int]]
    first: Mapping[Segment, int]
    last: Mapping[Segment, int]

    def split(self, actions: Iterable[Action]) -> list[tuple[Action, ...]]:
        """The actions of each call, over its own program."""
        num_parts = sum(region == "forward" for region, _ in self.first)
        found: list[list[Action]] = [[] for _ in range(num_parts)]
        for action in actions:
            if isinstance(action, StartBackward):
                for row in found:
                    row.append(action)
            elif isinstance(action, (Compute, Recompute)):
                at = self.where[action.op]
                if at is not None:
                    found[at[0]].append(type(action)(at[1]))
            else:
                call, storage = self.storage_of[action.storage]
                found[call].append(replace(action, storage=storage))
        return [tuple(row) for row in found]

    def merge(self, parts: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
        """The schedule of the step in which each call runs its own actions: the inverse of `split`."""
        op_at = {at: index for index, at in enumerate(self.where) if at is not None}
        storage_at = {at: storage for storage, at in self.storage_of.items()}
        out: list[Action] = []
        for segment, start in self.first.items():
            region, call = segment
            if region == "backward" and StartBackward() not in out:
                out.append(StartBackward())
            boundary = parts[call].index(StartBackward())
            own = parts[call][:boundary] if region == "forward" else parts[call][boundary + 1 :]
            moved = [_moved(action, call, op_at, storage_at) for action in own]
            early = [Compute(op) for op in range(self._opening(segment), start) if not self.program.ops[op].is_input]
            out += [*early, Compute(start), *(action for action in moved if action not in early)]
            out.append(Compute(self.last[segment]))
        return tuple(out if StartBackward() in out else [*out, StartBackward()])

    def _opening(self, segment: Segment) -> int:
        """The first op after the segment before."""
        return max((op + 1 for op in self.last.values() if op < self.first[segment]), default=0)


def _moved(
    action: Action, call: int, op_at: Mapping[tuple[int, int], int], storage_at: Mapping[tuple[int, int], int]
) -> Action:
    if isinstance(action, (Compute, Recompute)):
        return type(action)(op_at[call, action.op])
    if isinstance(action, StartBackward):
        return action
    return replace(action, storage=storage_at[call, action.storage])


def join(parts: Sequence[Part], backward_order: Sequence[int], beside: Beside | None = None) -> Joined:
    """One program of `parts`, whose backwards run in `backward_order` (those left out come last)."""
    order = [*dict.fromkeys(backward_order)]
    order += [call for call in reversed(range(len(parts))) if call not in order]
    order = [call for call in order if parts[call].has_backward]
    joiner = _Joiner(parts, beside or Beside(), order)
    joiner.add_held()
    for call in range(len(parts)):
        joiner.add_forward(call)
    for call in order:
        joiner.add_backward(call)
    return joiner.finish()


class _Joiner:
    """The joined program under construction."""

    def __init__(self, parts: Sequence[Part], beside: Beside, order: Sequence[int]) -> None:
        self.parts, self.beside, self.order = parts, beside, order
        self.ops: list[Op] = []
        self.sizes: list[Storage] = []
        self.where: list[tuple[int, int] | None] = []
        self.op_at: dict[tuple[int, int], int] = {}  # (call, op) -> joined op that holds its value
        self.storage_at: dict[tuple[int, int], int] = {}
        self.held: dict[Hashable, int] = {}  # key -> joined input op
        self.has_gradient: set[int] = set()  # joined storages of inputs whose gradient stands
        self.forward_outputs: list[int] = []
        self.backward_outputs: list[int] = []
        self.first: dict[Segment, int] = {}
        self.last: dict[Segment, int] = {}

    # building blocks

    def storage(self, nbytes: int, device: str = "") -> int:
        self.sizes.append(Storage(len(self.sizes), nbytes, device))
        return len(self.sizes) - 1

    def append(self, op: Op, at: tuple[int, int] | None) -> int:
        index = len(self.ops)
        self.ops.append(replace(op, index=index))
        self.where.append(at)
        if at is not None:
            self.op_at[at] = index
        return index

    def given(self, call: int, op: Op, region: Region, at: tuple[int, int] | None) -> int:
        """A value that comes from code between the calls: made here, and never again."""
        storages = tuple(self._new_storage(call, s) for s in op.storages)
        made = replace(op, region=region, args=(), storages=storages, is_input=False, recomputable=False)
        if not storages:  # a size: nothing to hold
            made = replace(made, is_random=True)
        return self.append(made, at)

    def _new_storage(self, call: int, storage: int) -> int:
        key = (call, storage)
        if key not in self.storage_at:
            source = self.parts[call].program.storages[storage]
            nbytes = source.nbytes
            assert isinstance(nbytes, int), "join takes programs with numbers for sizes"
            self.storage_at[key] = self.storage(nbytes, source.device)
        return self.storage_at[key]

    # the program, in its order

    def add_held(self) -> None:
        """Inputs that stood before the step, each once."""
        for call, part in enumerate(self.parts):
            for op in part.program.ops:
                if op.is_input and op.region == "forward" and not self._is_given(call, op):
                    self._hold(call, op)

    def _is_given(self, call: int, op: Op) -> bool:
        origins = self.parts[call].origins
        return any(s not in origins or isinstance(origins[s], Made) for s in op.storages)

    def _hold(self, call: int, op: Op) -> None:
        for storage in op.storages:
            key = self.parts[call].origins[storage]
            if key not in self.held:
                joined = self._new_storage(call, storage)
                self.held[key] = self.append(replace(op, args=(), storages=(joined,)), None)
            self.op_at[call, op.index] = self.held[key]
            self.storage_at[call, storage] = self.ops[self.held[key]].storages[0]
        if not op.storages:
            self.op_at[call, op.index] = self.append(replace(op, args=()), None)

    def add_forward(self, call: int) -> None:
        part = self.parts[call]
        inputs = [op for op in part.program.ops if op.is_input and op.region == "forward"]
        for op in inputs:
            if (call, op.index) not in self.op_at:
                self._add_given(call, op)
        self._open(("forward", call))
        for op in part.program.ops:
            if op.region == "forward" and not op.is_input:
                self._add(call, op)
        outputs = [self.op_at[call, index] for index in part.program.forward_outputs]
        waiting = [self.op_at[call, index] for index in sorted(part.kept or ())]
        self._close(("forward", call), [*outputs, *waiting])
        self.forward_outputs += [op for number, op in enumerate(outputs) if number not in part.dropped]

    def _add_given(self, call: int, op: Op) -> None:
        """An input that the step made: by another call, or between calls."""
        for storage in op.storages:
            origin = self.parts[call].origins.get(storage)
            if isinstance(origin, Made):
                source = self.op_at[origin.call, self.parts[origin.call].program.forward_outputs[origin.output]]
                self.op_at[call, op.index] = source
                self.storage_at[call, storage] = self.ops[source].storages[0]
                self._never_again(self.ops[source].storages[0])
                return
        self.op_at[call, op.index] = self.given(call, op, "forward", None)

    def _never_again(self, storage: int) -> None:
        """What another call reads is made once: a call can't run again what belongs to another."""
        producer = next(op for op in self.ops if storage in op.storages)
        self.ops[producer.index] = producer.once

    def _open(self, segment: Segment) -> None:
        region, call = segment
        before = self.beside.before.get(segment, 0)
        held = self.beside.during.get(segment, 0)
        name = f"beside the {region} of call {call}"
        storages = (self.storage(held),) if held else ()
        op = Op(-1, name, "mark", region, (), storages, workspace_bytes=before, is_random=True, recomputable=False)
        self.first[segment] = self.append(op, None)

    def _close(self, segment: Segment, reads: Iterable[int]) -> None:
        """What the segment returns, was given, or stood beside it lives to its end."""
        region, call = segment
        opening = self.first[segment]
        args = tuple(dict.fromkeys([*reads, *([opening] if self.ops[opening].storages else [])]))
        op = Op(-1, f"end of the {region} of call {call}", "mark", region, args, (), is_random=True, recomputable=False)
        self.last[segment] = self.append(op, None)

    def _add(self, call: int, op: Op) -> int:
        storages = tuple(self._new_storage(call, s) for s in op.storages)
        args = tuple(self.op_at[call, a] for a in op.args)
        mutates = tuple(self.storage_at[call, s] for s in op.mutates)
        joined = replace(op, args=args, storages=storages, mutates=mutates, part=self._part(call, op))
        return self.append(joined, (call, op.index))

    def _part(self, call: int, op: Op) -> SplitPart | None:
        """Regions are numbered through all calls."""
        before = sum(len(part.program.fissions) for part in self.parts[:call])
        return op.part and replace(op.part, region=op.part.region + before)

    def add_backward(self, call: int) -> None:
        part = self.parts[call]
        segment: Segment = ("backward", call)
        ops = [op for op in part.program.ops if op.region == "backward"]
        if not ops:
            return
        tangents = [self.given(call, op, "backward", (call, op.index)) for op in ops if op.is_input]
        self._open(segment)
        for op in ops:
            if not op.is_input:
                self._add(call, op)
        returned = [self.op_at[call, index] for index in part.program.backward_outputs]
        self._close(segment, [*tangents, *returned])
        self.backward_outputs += [op for number, op in enumerate(returned) if self._stays(call, number)]

    def _stays(self, call: int, gradient: int) -> bool:
        """Is this the first gradient of something that stood before the step? Later ones are added to it."""
        storage = self.parts[call].gradients.get(gradient)
        if storage is None or isinstance(self.parts[call].origins.get(storage), Made):
            return False
        if storage not in self.parts[call].origins:
            return False
        joined = self.storage_at[call, storage]
        if joined in self.has_gradient:
            return False
        self.has_gradient.add(joined)
        return True

    def finish(self) -> Joined:
        static = {self.op_at[call, i] for call, part in enumerate(self.parts) for i in part.program.static}
        program = Program(
            name="step",
            ops=tuple(self.ops),
            storages=tuple(self.sizes),
            forward_outputs=tuple(dict.fromkeys(self.forward_outputs)),
            backward_outputs=tuple(dict.fromkeys(self.backward_outputs)),
            static=tuple(sorted(static)),
            extra_resident_bytes=self.beside.throughout,
            fissions=tuple(fission for part in self.parts for fission in part.program.fissions),
            unsplit=self._unsplit(),
        )
        owners = {joined: at for at, joined in self.storage_at.items() if self._owns(at)}
        return Joined(self.parts, program, tuple(self.where), owners, self.first, self.last)

    def _unsplit(self) -> Program | None:
        """The step as it was before any of its graphs was split."""
        if all(part.program.unsplit is None for part in self.parts):
            return None
        parts = [replace(part, program=part.program.unsplit or part.program) for part in self.parts]
        return join(parts, self.order, self.beside).program

    def _owns(self, at: tuple[int, int]) -> bool:
        """Does the call make this storage?"""
        call, storage = at
        program = self.parts[call].program
        return not program.ops[program.producer[storage]].is_input


def with_numbers(program: Program, values: Mapping[str, int]) -> Program:
    """`program` with its sizes as numbers, those that `values` give to its symbols."""
    if not program.is_symbolic:
        return program
    at = program.at({**program.hints, **values})
    sizes = zip(at.storages, at.nbytes(), strict=True)
    unsplit = at.unsplit and with_numbers(at.unsplit, values)
    return replace(at, storages=tuple(replace(s, nbytes=n) for s, n in sizes), hints={}, unsplit=unsplit)
