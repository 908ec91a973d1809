"""One stage's own graph under its share of a device: what to recompute or offload so that n microbatches in flight fit.

Any planner of the registry serves. It sees the stage with its messages as values that come and go (`lane_program`) and
with a limit on what crosses the start of backward, which is paid once for every microbatch in flight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Fission, Op, Program, Region
from fxmem.passes.offload import why_not_offloadable
from fxmem.passes.stage_split import StageGraph
from fxmem.planners import Options, get_planner
from fxmem.planners.plan import baseline_actions
from fxmem.planners.problem import reduce_program
from fxmem.planners.recompute.bound import least_bytes
from fxmem.planners.smallest import is_valid
from fxmem.schedule import Action, StartBackward, simulate
from fxmem.schedule.actions import Compute, Recompute

TRANSIENTS = ((1.0, 0.0), (1.0, 0.2), (1.0, 0.5), (0.5, 0.0))
"""Guesses of what stands beside saved tensors at the peak: shares of what does with everything saved, and of what is
saved then (recomputed pieces stand there while they are used)."""
SMALL_PEAKS = (1.02, 1.1, 1.25)
"""Limits on the peak where room is short, in units of the least that any schedule has."""
SPEND_S = 6.0
"""Seconds of solving, for rooms that were enough, after which a stage is content with what it has found for other rooms
and counts, if that fits."""


@dataclass(frozen=True)
class StageActions:
    """How a stage runs. `saved_bytes`: from forward to backward; `peak_bytes`: of one microbatch; `extra_s`: seconds of
    recomputation and of waiting for transfers; `forward_s`, `backward_s`: of one microbatch, those included;
    `moved_bytes`: to and from a tier; `fissions`: what of the stage runs in parts (seconds of which count as extra), as
    the actions have it. Parameters don't count.
    """

    actions: tuple[Action, ...]
    saved_bytes: int
    peak_bytes: int
    forward_s: float
    backward_s: float
    extra_s: float
    moved_bytes: int
    fissions: tuple[Fission, ...] = ()

    def need_bytes(self, in_flight: int) -> int:
        return (in_flight - 1) * self.saved_bytes + self.peak_bytes


class StagePlanner:
    """Plans one stage; what was found is kept. With tiers it is never worse than the same planner without them.

    `least_bytes`: what no schedule does with less than, parameters left out.
    """

    def __init__(self, graph: StageGraph, program: Program, planner: str, options: Options) -> None:
        without = replace(options, tiers=())
        self._alone = StagePlanner(graph, program, planner, without) if options.tiers else None
        pinned = _pinned(graph, program) if options.tiers else frozenset()
        self._solve, self._options = get_planner(planner), replace(options, pinned=pinned)
        self._lane, self._original = lane_program(program, graph)
        self._inputs = {op.index for op in program.ops if op.is_input}
        problem = reduce_program(self._lane)
        self._base_bytes = problem.base_bytes
        self.least_bytes = least_bytes(problem) - problem.base_bytes
        self._made: dict[tuple[int, int], StageActions | int] = {}
        self._found: list[StageActions] = []
        self._spent_s = 0.0

    @cached_property
    def everything_saved(self) -> StageActions:
        return self._figures(baseline_actions(reduce_program(self._lane)))

    def plan(self, room_bytes: int, in_flight: int) -> StageActions:
        """The fastest way found that fits `room_bytes` with `in_flight` microbatches.

        Raises BudgetInfeasible with the room that was found to be enough (never less than asked for).
        """
        key = (room_bytes, in_flight)
        if key not in self._made:
            self._made[key] = self._plan(room_bytes, in_flight)
        found = self._made[key]
        if isinstance(found, int):
            raise BudgetInfeasible(room_bytes, found)
        return found

    def smallest(self, in_flight: int, rounds: int = 7) -> StageActions:
        """The way of least bytes found, by bisection over the room."""
        best = self._alone.smallest(in_flight, rounds) if self._alone else self.everything_saved
        low = 0
        for _ in range(rounds):
            need = best.need_bytes(in_flight)
            middle = (low + need) // 2
            try:
                found = self.plan(middle, in_flight)
            except BudgetInfeasible:
                low = middle
                continue
            best = found
        return best

    def _plan(self, room_bytes: int, in_flight: int) -> StageActions | int:
        whole = self.everything_saved
        if whole.need_bytes(in_flight) <= room_bytes:
            return whole

        if self._alone:
            with contextlib.suppress(BudgetInfeasible):
                self._found.append(self._alone.plan(room_bytes, in_flight))

        def fitting() -> list[StageActions]:
            return [made for made in self._found if made.need_bytes(in_flight) <= room_bytes]

        if self._spent_s < SPEND_S or not fitting():
            started = self._options.effort.now()
            for limit in self._likely_peaks(room_bytes, in_flight):
                self._solve_under(limit, room_bytes, in_flight)
            for limit in self._small_peaks(in_flight):
                if fitting():
                    break
                self._solve_under(limit, room_bytes, in_flight)
            self._spent_s += self._options.effort.now() - started if fitting() else 0.0
        if found := fitting():
            return min(found, key=lambda made: made.extra_s)
        return min(made.need_bytes(in_flight) for made in (whole, *self._found))

    def _likely_peaks(self, room_bytes: int, in_flight: int) -> Iterator[int]:
        """Limits on the peak of one microbatch, which leave the rest of the room to what the others save."""
        whole = self.everything_saved
        for share, again in TRANSIENTS if in_flight > 1 else ((0.0, 0.0),):
            beside = share * (whole.peak_bytes - whole.saved_bytes) + again * whole.saved_bytes
            yield room_bytes - (in_flight - 1) * int((room_bytes - beside) / in_flight)

    def _small_peaks(self, in_flight: int) -> Iterator[int]:
        """Those for a room that is too small so far: near the least there can be, and the peak of the smallest plan."""
        if in_flight == 1:
            return
        yield from (int(factor * self.least_bytes) for factor in SMALL_PEAKS)
        yield min((self.everything_saved, *self._found), key=lambda made: made.need_bytes(in_flight)).peak_bytes

    def _solve_under(self, limit: int, room_bytes: int, in_flight: int) -> None:
        """Look for a plan of that peak whose saved tensors fit the room as often as needed; keep what is found."""
        saved = (room_bytes - limit) // max(in_flight - 1, 1)
        if limit < self.least_bytes or (in_flight > 1 and saved <= 0):
            return
        lane = self._lane if in_flight == 1 else _with_boundary(self._lane, limit - saved)
        problem = reduce_program(lane)
        try:
            actions = self._solve(problem, self._base_bytes + limit, self._options).actions
        except BudgetInfeasible as error:
            if not is_valid(error.actions, problem, self._options):
                return
            actions = error.actions
        self._found.append(self._figures(actions))

    def _figures(self, actions: Sequence[Action]) -> StageActions:
        result = simulate(self._lane, actions, self._options.machine)
        boundary = actions.index(StartBackward())
        forward_s = max((s.end_s for s in result.spans if s.step < boundary and s.stream == "compute"), default=0.0)
        return StageActions(
            tuple(self._translated(actions)),
            int(result.bytes_at[boundary]) - self._base_bytes,
            result.peak_bytes - self._base_bytes,
            forward_s,
            result.seconds - forward_s,
            result.recompute_s + result.stall_s,
            result.bytes_moved,
        )

    def _translated(self, actions: Sequence[Action]) -> Iterator[Action]:
        """Actions over the stage's own program."""
        for action in actions:
            if isinstance(action, (Compute, Recompute)):
                op = self._original[action.op]
                if op >= 0:
                    yield type(action)(op)
            else:
                yield action


def lane_program(program: Program, graph: StageGraph) -> tuple[Program, tuple[int, ...]]:
    """`program` of a stage as one of many microbatches sees it, and the original index of each op (-1: none).

    What is received is made by an op at the start of its region and dies after its last use; what is sent lives to the
    end of its region; every gradient is handed over right after it is made. Parameters and the batch are resident.
    """
    arriving = {*graph.receives, *graph.grad_receives, *graph.joint.tangents}
    gradients = set(program.backward_outputs)
    names = {op.name: op.index for op in program.ops}
    sends = [names[name] for name in graph.grad_sends]
    ops: list[Op] = []
    original: list[int] = []
    place: dict[int, int] = {}

    def add(op: Op, source: int) -> None:
        ops.append(replace(op, index=len(ops)))
        original.append(source)

    def hand_over(values: Sequence[int], region: Region) -> None:
        args = tuple(place[v] for v in values)
        name = f"hand_over_{len(ops)}"
        add(Op(0, name, "fxmem.hand_over", region, args, (), is_collective=True, recomputable=False), -1)

    forward = [op for op in program.ops if op.region == "forward"]
    backward = [op for op in program.ops if op.region == "backward"]
    regions: tuple[tuple[Region, list[Op]], ...] = (("forward", forward), ("backward", backward))
    for region, part in regions:
        if region == "backward":
            for early in sorted(gradients & {op.index for op in forward}):
                hand_over([early], region)
        for op in part:
            place[op.index] = len(ops)
            made = replace(op, args=tuple(place[a] for a in op.args))
            if op.name in arriving:
                made = replace(made, is_input=False, recomputable=False)
            add(made, -1 if op.name in arriving else op.index)
            if region == "backward" and op.index in gradients and op.index not in sends:
                hand_over([op.index], region)
        values = list(program.forward_outputs) if region == "forward" else sends
        if values:
            hand_over(values, region)
    static = tuple(place[i] for i in program.static)
    lane = replace(program, ops=tuple(ops), forward_outputs=(), backward_outputs=(), static=static, graph="")
    return lane, tuple(original)


def _pinned(graph: StageGraph, program: Program) -> frozenset[int]:
    """Storages that may not be offloaded. What was received may, unless it is passed on."""
    received = {s for op in program.ops if op.name in set(graph.receives) for s in op.storages}
    outputs = (*program.forward_outputs, *program.backward_outputs)
    returned = {s for index in outputs for s in program.ops[index].storages}
    return frozenset(why_not_offloadable(graph.joint, program, min_bytes=1)) - (received - returned)


def _with_boundary(lane: Program, workspace_bytes: int) -> Program:
    """`lane` whose first backward op takes a workspace: under a limit on the peak, that limits what crosses."""
    first = next(op for op in lane.ops if op.region == "backward")
    ops = (*lane.ops[: first.index], replace(first, workspace_bytes=workspace_bytes), *lane.ops[first.index + 1 :])
    return replace(lane, ops=ops)
