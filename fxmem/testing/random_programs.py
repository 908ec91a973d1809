"""Hypothesis strategies for random training programs and valid schedules of them, and the invariants as checks.

For anyone who writes planners or FX passes: draw a program, plan it, and call `check_schedule`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from fxmem.errors import VerifyError
from fxmem.ir.program import Op, Program, Storage
from fxmem.planners.plan import Plan, judge
from fxmem.planners.problem import Problem, reduce_program
from fxmem.schedule import Action, Compute, Free, Machine, Offload, Recompute, Reload, StartBackward, Wait, simulate
from fxmem.schedule.actions import Tier
from fxmem.schedule.simulate import Link, reads_of


@dataclass(frozen=True)
class Shape:
    """Bounds of a random program: forward ops, operands of an op, bytes of a storage, seconds of an op."""

    num_forward: tuple[int, int] = (2, 8)
    max_operands: int = 3
    max_bytes: int = 64
    max_seconds: int = 8


@st.composite
def programs(draw: st.DrawFn, shape: Shape = Shape()) -> Program:
    """A random training step: forward ops over inputs (some views, random or two-output ones), then one backward op per
    forward op in reverse, each reading the gradient so far and a random part of forward's values."""
    builder = _Builder(draw, shape)
    for index in range(draw(st.integers(1, 2))):
        builder.add(f"input{index}", "input", "forward", (), is_input=True)
    num_forward = draw(st.integers(*shape.num_forward))
    for index in range(num_forward):
        builder.forward_op(index)
    loss = len(builder.ops) - 1
    tangent = builder.add("tangent", "tangent", "backward", (), is_input=True)
    gradients = builder.backward_ops(loss, tangent)
    return Program(
        name="random",
        ops=tuple(builder.ops),
        storages=tuple(builder.storages),
        forward_outputs=(loss,),
        backward_outputs=tuple(gradients),
        static=(0,),
        extra_resident_bytes=draw(st.integers(0, 16)),
    )


class _Builder:
    def __init__(self, draw: st.DrawFn, shape: Shape) -> None:
        self.draw, self.shape = draw, shape
        self.ops: list[Op] = []
        self.storages: list[Storage] = []

    def add(
        self,
        name: str,
        target: str,
        region: str,
        args: tuple[int, ...],
        is_input: bool = False,
        is_random: bool = False,
        num_outputs: int = 1,
    ) -> int:
        draw = self.draw
        fresh = tuple(range(len(self.storages), len(self.storages) + num_outputs))
        self.storages += [Storage(s, draw(st.integers(0, self.shape.max_bytes))) for s in fresh]
        return self._append(
            Op(
                index=len(self.ops),
                name=name,
                target=target,
                region="forward" if region == "forward" else "backward",
                args=args,
                storages=fresh,
                is_input=is_input,
                seconds=0.0 if is_input else float(draw(st.integers(0, self.shape.max_seconds))),
                workspace_bytes=0 if is_input else draw(st.sampled_from([0, 0, 0, 8, 32])),
                is_random=is_random,
                recomputable=not (is_input or is_random),
            )
        )

    def _append(self, op: Op) -> int:
        self.ops.append(op)
        return op.index

    def operands(self, below: int) -> tuple[int, ...]:
        indices = st.lists(st.integers(0, below - 1), min_size=1, max_size=self.shape.max_operands, unique=True)
        return tuple(self.draw(indices))

    def forward_op(self, number: int) -> None:
        args = (*self.operands(len(self.ops)), len(self.ops) - 1)
        kind = self.draw(st.sampled_from(["plain", "plain", "plain", "view", "random", "pair"]))
        if kind == "view":
            base = self.ops[args[0]]
            self._append(Op(len(self.ops), f"view{number}", "view", "forward", args[:1], base.storages[:1]))
            args = (len(self.ops) - 1,)
        self.add(
            f"op{number}",
            kind,
            "forward",
            tuple(dict.fromkeys(args)),
            False,
            kind == "random",
            2 if kind == "pair" else 1,
        )

    def backward_ops(self, loss: int, tangent: int) -> list[int]:
        gradient, returned = tangent, []
        for index in range(loss, -1, -1):
            if self.ops[index].is_input or self.ops[index].target == "view":
                continue
            args = tuple(dict.fromkeys((gradient, *self.operands(loss + 1))))
            gradient = self.add(f"grad_{self.ops[index].name}", "grad", "backward", args)
            if self.draw(st.booleans()):
                returned.append(gradient)
        return returned or [gradient]


@st.composite
def schedules(
    draw: st.DrawFn, program: Program, tiers: Sequence[Tier] = (), pinned: Collection[int] = ()
) -> tuple[Action, ...]:
    """A random valid schedule of `program`.

    Every forward value is kept or dropped at the boundary; what is missing is recomputed just in time and dropped again
    at random. With `tiers`, some values leave for one of them between two reads and come back; `pinned` ones stay.
    """
    actions = draw(_recomputing(program))
    if not tiers:
        return actions
    nbytes = program.nbytes()
    return _with_offloads(draw, program, actions, tiers, {s for s, n in enumerate(nbytes) if not n} | set(pinned))


@st.composite
def plans(draw: st.DrawFn, shape: Shape = Shape(), tiers: Sequence[Tier] = ("host", "disk")) -> Plan:
    """A random program with a random valid plan of it: recomputation, drops, and offloads to `tiers`."""
    program = draw(programs(shape))
    machine = Machine({tier: Link(float(2 + i), float(1 + i), 0.5) for i, tier in enumerate(tiers)})
    return judge(program, draw(schedules(program, tiers)), "drawn", None, machine)


@st.composite
def _recomputing(draw: st.DrawFn, program: Program) -> tuple[Action, ...]:
    problem = reduce_program(program)
    order = list(range(problem.num_forward))
    available = {
        int(s)
        for s in range(problem.num_storages)
        if problem.producer[s] < 0 or not problem.recomputable[problem.producer[s]] or draw(st.booleans())
    }
    for kernel in range(problem.num_forward, problem.num_kernels):
        for storage in problem.reads(kernel):
            _bring_back(problem, int(storage), available, order)
        order.append(kernel)
        available.update(int(s) for s in problem.writes(kernel))
        for storage in problem.reads(kernel):
            producer = problem.producer[storage]
            if 0 <= producer < problem.num_forward and problem.recomputable[producer] and draw(st.booleans()):
                available.discard(int(storage))
    return problem.actions(order, problem.num_forward)


def _bring_back(problem: Problem, storage: int, available: set[int], order: list[int]) -> None:
    if storage in available:
        return
    kernel = int(problem.producer[storage])
    for operand in problem.reads(kernel):
        _bring_back(problem, int(operand), available, order)
    order.append(kernel)
    available.update(int(s) for s in problem.writes(kernel))


def _with_offloads(
    draw: st.DrawFn, program: Program, actions: Sequence[Action], tiers: Sequence[Tier], stay: Collection[int]
) -> tuple[Action, ...]:
    """`actions` with round trips to a tier between two uses of one residency; at most one for each storage."""
    written = {s for op in program.ops for s in op.mutates}
    fixed = {*stay, *written, *program.resident, *program.kept}
    before: dict[int, list[Action]] = {}  # step -> what happens just before it
    moved: set[int] = set()
    for storage, first, last in simulate(program, actions).lifetimes:
        reads = [step for step in range(first + 1, last + 1) if _reads(program, actions, step, storage)]
        if storage in fixed or storage in moved or not reads or not draw(st.booleans()):
            continue
        moved.add(storage)
        index = draw(st.integers(0, len(reads) - 1))
        start, end = [first, *reads][index] + 1, reads[index]
        places = sorted(draw(st.integers(start, end)) for _ in range(4))
        tier = draw(st.sampled_from(tiers))
        trip: tuple[Action, ...] = Offload(storage, tier), Free(storage), Reload(storage), Wait(storage)
        for place, action in zip(places, trip, strict=True):
            before.setdefault(place, []).append(action)
    return tuple(a for step, action in enumerate(actions) for a in (*before.get(step, ()), action))


def _reads(program: Program, actions: Sequence[Action], step: int, storage: int) -> bool:
    return step < len(actions) and storage in reads_of(program, actions[step])


def oracle_peak_bytes(program: Program, actions: Sequence[Action]) -> int:
    """Peak of a schedule by brute force, written apart from the simulator: at each step, ask of every residency whether
    a later step reads it."""
    nbytes = program.nbytes()
    resident = set(program.resident)
    base = program.extra_resident_bytes + sum(nbytes[s] for s in resident)
    tangents = [op.index for op in program.ops if op.is_input and op.region == "backward"]
    returned = (*program.forward_outputs, *program.backward_outputs, *tangents)
    kept = {s for index in returned for s in program.ops[index].storages}
    births = [(step, s) for step, action in enumerate(actions) for s in _created(program, action)]
    peak = base
    for now, action in enumerate(actions):
        level = base
        for born, storage in births:
            if born <= now and _alive(program, actions, storage, born, now, births, kept):
                level += nbytes[storage]
        if isinstance(action, (Compute, Recompute)):
            level += program.ops[action.op].workspace_bytes
        peak = max(peak, level)
    return peak


def _created(program: Program, action: Action) -> tuple[int, ...]:
    if isinstance(action, (Compute, Recompute)):
        return program.allocates(program.ops[action.op])
    return (action.storage,) if isinstance(action, Reload) else ()


def _needs(program: Program, action: Action, storage: int) -> bool:
    if isinstance(action, (Compute, Recompute)):
        op = program.ops[action.op]
        return storage in program.reads(op) or storage in op.mutates
    return isinstance(action, (Offload, Wait)) and action.storage == storage


def _alive(
    program: Program,
    actions: Sequence[Action],
    storage: int,
    born: int,
    now: int,
    births: Sequence[tuple[int, int]],
    kept: set[int],
) -> bool:
    """Is the residency of `storage` that began at `born` there at step `now`?"""
    if storage in kept:
        return now == born or born == min(step for step, s in births if s == storage)
    later = [step for step, s in births if s == storage and step > born]
    end = min(later, default=len(actions))
    frees = [step for step in range(born + 1, end) if actions[step] == Free(storage)]
    if frees:
        return now < frees[0]
    return now == born or any(
        _needs(program, actions[step], storage) for step in range(now, min(end + 1, len(actions)))
    )


def check_schedule(
    program: Program, actions: Sequence[Action], budget_bytes: int | None = None, machine: Machine | None = None
) -> int:
    """Assert that `actions` are a valid schedule, agree with the oracle, and stay under the budget; returns the peak.

    Valid: every read finds its value on the device, waited for; effects happen once; backward starts once, after
    forward. `machine`: its links (a schedule that offloads needs them). Raises AssertionError naming the action.
    """
    try:
        result = simulate(program, actions, machine or Machine())
    except VerifyError as error:
        raise AssertionError(str(error)) from error
    expected = oracle_peak_bytes(program, actions)
    assert result.peak_bytes == expected, f"the simulator says {result.peak_bytes} bytes, the oracle {expected}"
    assert actions.count(StartBackward()) == 1, "backward does not start exactly once"
    if budget_bytes is not None:
        assert result.peak_bytes <= budget_bytes, f"peaks at {result.peak_bytes} bytes, over {budget_bytes}"
    return result.peak_bytes
