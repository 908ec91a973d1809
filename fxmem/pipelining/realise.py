"""From a plan over a chain to stages that run: real graphs, each planned under its share, every rank's bytes foretold.

The chain proposes cuts, schedule and in-flight counts; here its stages' own joint graphs are planned and played through
the schedule's actions, and a stage's room is corrected by what the play shows until each rank fits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import fx

from fxmem import compat
from fxmem.analysis.calls import call_of
from fxmem.analysis.profile import profile_calls
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.passes.stage_split import StageGraph
from fxmem.pipelining.chain import Cluster
from fxmem.pipelining.schedules import Schedule
from fxmem.pipelining.simulate import Simulation, StageCost, simulate
from fxmem.pipelining.stage_forms import Fissions, StageForms, split_stage
from fxmem.pipelining.stage_plan import StageActions, StagePlanner
from fxmem.planners import Options
from fxmem.runtime.pipeline.code import StageCode, stage_program
from fxmem.runtime.pipeline.memory import Moment, RankBytes, RankPlay, StageBytes
from fxmem.runtime.pipeline.pipeline import Pipeline
from fxmem.units import align_up

NUM_ROUNDS = 8
Annotate: TypeAlias = Callable[[Program, fx.GraphModule], Program]
_CUT_OP_S, _LOWERED_OP_S, _PLAYED_S = 2e-4, 2.5e-4, 1e-3
"""Effort (see `fxmem.planners.effort`): of cutting, for every op of the stages; of lowering a planned stage, for every
op; of playing a schedule, for every action."""


@dataclass(frozen=True)
class Beside:
    """What stands on every rank beside the stages: `batch_bytes`; per trained parameter `optimizer_share` of its bytes
    and, if `has_gradients`, a gradient from before the step. `rounding`: of allocations, in bytes.
    """

    batch_bytes: int
    optimizer_share: float
    has_gradients: bool
    rounding: int


@dataclass(frozen=True)
class Realised:
    """Stages that run. `peak_bytes`, `moments` (of every action): per rank; `in_flight`: per stage."""

    positions: tuple[int, ...]
    schedule: Schedule
    stages: tuple[StageActions, ...]
    peak_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    simulation: Simulation
    moments: tuple[tuple[Moment, ...], ...]

    @property
    def step_s(self) -> float:
        return self.simulation.step_s

    def infeasible(self, budget_bytes: int) -> BudgetInfeasible:
        """The error that names the rank that needs most, its first stage, and what stands there."""
        rank = max(range(len(self.peak_bytes)), key=lambda r: self.peak_bytes[r])
        mine = [s for s, device in enumerate(self.schedule.device_of) if device == rank]
        rows: list[tuple[str, int]] = []
        for s in mine:
            planned, count = self.stages[s], self.in_flight[s]
            rows.append((f"stage {s}: saved by {count} microbatches in flight", count * planned.saved_bytes))
            rows.append((f"stage {s}: beside that while one runs", planned.peak_bytes - planned.saved_bytes))
        rest = self.peak_bytes[rank] - sum(nbytes for _, nbytes in rows)
        rows.insert(0, (f"stage {mine[0]}: parameters, gradients, optimizer state, batch, messages", max(rest, 0)))
        where = f" on rank {rank} (stage {mine[0]} of {len(self.stages)})"
        return BudgetInfeasible(budget_bytes, self.peak_bytes[rank], rows, where)


class Realiser:
    """Makes `Realised`s of one captured model; `program` is its graph with costs. `measure_s`: seconds that may go into
    measuring ops that a split backward has and `program` has not. `annotate`: gives costs to stages with regions in
    parts. `splits`: may there be such?
    """

    def __init__(
        self,
        pipeline: Pipeline,
        program: Program,
        beside: Beside,
        cluster: Cluster,
        planner: str,
        options: Options,
        annotate: Annotate,
        measure_s: float = 0.0,
    ) -> None:
        self._annotate, self.splits = annotate, False
        self.pipeline, self.program, self.beside, self.cluster = pipeline, program, beside, cluster
        self._planner, self._options, self._measure_s = planner, options, measure_s
        self.effort = options.effort
        self._costs = {op.name: op for op in program.ops}
        self._planners: dict[str, StagePlanner] = {}
        self._forms: dict[StagePlanner, StageForms] = {}
        self._bytes: dict[tuple[tuple[int, ...], int, tuple[object, ...]], StageBytes] = {}
        self._programs: dict[tuple[tuple[int, ...], int], Program] = {}
        self._split: dict[tuple[tuple[int, ...], int, Fissions], tuple[StageGraph, Program]] = {}

    def realise(self, positions: tuple[int, ...], schedule: Schedule, budget_bytes: float) -> Realised:
        """Plan the stages of those cuts under `budget_bytes` a rank.

        Raises CutError; BudgetInfeasible naming the stage, with a budget that is enough for this cut and schedule.
        """
        cut = _Cut(self, positions, schedule)
        return cut.fit(budget_bytes)

    def smallest(self, positions: tuple[int, ...], schedule: Schedule) -> Realised:
        """The stages of those cuts in the fewest bytes found."""
        cut = _Cut(self, positions, schedule)
        return cut.realised([p.smallest(n) for p, n in zip(cut.planners, cut.in_flight, strict=True)])

    def program_of(self, graph: StageGraph, positions: tuple[int, ...]) -> Program:
        """A stage's program with the costs and sizes of the whole graph's."""
        key = (positions, graph.index)
        if key not in self._programs:
            self._programs[key] = self._annotated(stage_program(graph))
        return self._programs[key]

    def _annotated(self, program: Program) -> Program:
        whole, nbytes = self.program, self.program.nbytes()
        sizes: dict[int, int] = {}
        for op in program.ops:
            known = self._costs[op.name]
            made, real = program.allocates(op), whole.allocates(known)
            if len(made) == len(real):
                sizes.update(zip(made, (nbytes[s] for s in real), strict=True))
        storages = tuple(
            replace(s, nbytes=sizes.get(s.id, align_up(int(s.nbytes), self.beside.rounding))) for s in program.storages
        )
        seconds = [self._costs[op.name].seconds for op in program.ops]
        workspaces = [self._costs[op.name].workspace_bytes for op in program.ops]
        return replace(program, storages=storages).with_costs(seconds, workspaces)

    def planner_of(self, graph: StageGraph, program: Program) -> StagePlanner:
        """Stages whose graphs are alike share one."""
        key = graph.joint.fingerprint + str((len(graph.receives), len(graph.sends), len(graph.gradients)))
        if key not in self._planners:
            self._planners[key] = StagePlanner(graph, program, self._planner, self._options)
        return self._planners[key]

    def forms_of(self, graph: StageGraph, positions: tuple[int, ...], whole: StagePlanner) -> StageForms:
        """The same stage split as well."""

        def planner_of(fissions: Fissions) -> StagePlanner:
            return StagePlanner(*self.split_of(graph, positions, fissions), self._planner, self._options)

        if whole not in self._forms:
            self._forms[whole] = StageForms(graph, self.program_of(graph, positions), whole, planner_of)
        return self._forms[whole]

    def split_of(
        self, graph: StageGraph, positions: tuple[int, ...], fissions: Fissions
    ) -> tuple[StageGraph, Program]:
        """A stage with those regions in parts, and its program with costs."""
        if not fissions:
            return graph, self.program_of(graph, positions)
        key = (positions, graph.index, fissions)
        if key not in self._split:
            made = split_stage(graph, fissions)
            program = self._annotate(stage_program(made), made.joint.graph_module)
            storages = (replace(s, nbytes=align_up(int(s.nbytes), self.beside.rounding)) for s in program.storages)
            self._split[key] = made, replace(program, storages=tuple(storages))
        return self._split[key]

    def bytes_of(self, graph: StageGraph, positions: tuple[int, ...], actions: StageActions) -> StageBytes:
        key = (positions, graph.index, (actions.fissions, actions.actions))
        if key not in self._bytes:
            self.effort.spend(_LOWERED_OP_S * len(graph.joint.nodes))
            graph, program = self.split_of(graph, positions, actions.fissions)
            code = StageCode(graph, actions.actions)
            self._bytes[key] = StageBytes(code, program, self.beside.rounding, self._workspace)
        return self._bytes[key]

    def _workspace(self, node: fx.Node) -> int | None:
        """Of one op, measured (now or in an earlier process) if that is allowed."""
        call = call_of(node, {})
        if not self._measure_s:
            return None
        started = time.perf_counter()
        measured, _ = profile_calls({call.key: call}, self._measure_s)
        self._measure_s = max(self._measure_s - (time.perf_counter() - started), 1e-9)
        return measured[call.key].workspace_bytes if call.key in measured else None


class _Cut:
    """One cut and schedule."""

    def __init__(self, of: Realiser, positions: tuple[int, ...], schedule: Schedule) -> None:
        self.of, self.positions, self.schedule = of, positions, schedule
        pipeline, rank_of = of.pipeline, schedule.device_of
        self.rows = schedule.as_csv_rows()
        pipeline.cut(positions, "actions", self.rows, rank_of)
        self.graphs, self.rank_of = pipeline.stage_graphs, rank_of
        self.transfers = compat.with_transfers(self.rows, rank_of)
        of.effort.spend(_CUT_OP_S * sum(len(graph.joint.nodes) for graph in self.graphs))
        self.in_flight = schedule.in_flight_of_stage
        whole = [of.planner_of(g, of.program_of(g, positions)) for g in self.graphs]
        self.planners: Sequence[StagePlanner | StageForms] = whole
        if of.splits:
            self.planners = [of.forms_of(g, positions, planner) for g, planner in zip(self.graphs, whole, strict=True)]
        self.beside = [self._beside(rank) for rank in range(schedule.num_devices)]

    def _beside(self, rank: int) -> RankBytes:
        pipeline, known = self.of.pipeline, self.of.beside
        sizes = {n: align_up(t.nbytes, known.rounding) for n, t in pipeline.tensors.items()}
        held, trained = pipeline.held(rank), pipeline.trained
        mine = frozenset(held) & trained
        with_gradient = mine if known.has_gradients else frozenset()
        optimizer_bytes = math.ceil(known.optimizer_share * sum(sizes[n] for n in mine))
        kept = pipeline.kept - set(held)
        fixed = sum(sizes[n] for n in (*held, *kept, *with_gradient)) + optimizer_bytes + known.batch_bytes
        return RankBytes(fixed, sizes, with_gradient, pipeline.shared)

    def standing(self, rank: int) -> int:
        """Bytes of a rank once every gradient is there, no microbatch under way."""
        beside, trained = self.beside[rank], self.of.pipeline.trained
        new = (n for n in self.of.pipeline.held(rank) if n in trained and n not in beside.with_gradient)
        return beside.fixed_bytes + sum(beside.parameter_bytes[n] for n in new)

    def fit(self, budget_bytes: float) -> Realised:
        stages = [planner.everything_saved for planner in self.planners]
        best = self.realised(stages)
        if max(best.peak_bytes) <= budget_bytes:
            return best
        rooms = [self._room(s, stages, budget_bytes) for s in range(len(stages))]
        found: Realised | None = None
        for number in range(NUM_ROUNDS):
            made = self.realised([self._plan(s, rooms[s], budget_bytes) for s in range(len(stages))])
            over = [peak - budget_bytes for peak in made.peak_bytes]
            if max(over) <= 0 and (found is None or made.step_s < found.step_s):
                found = made
            again = self._corrected(rooms, made, [o * (1 + max(number - 1, 0) / 2) for o in over], budget_bytes)
            if again == rooms or (found is not None and max(over) > 0):
                break
            rooms = again
        if found is None:
            raise made.infeasible(int(budget_bytes))
        return found

    def _room(self, stage: int, stages: Sequence[StageActions], budget_bytes: float) -> float:
        """The rank's budget without what stands there, shared by its stages as they would have it with no limit."""
        rank = self.rank_of[stage]
        mine = [s for s in range(len(stages)) if self.rank_of[s] == rank]
        needs = {s: stages[s].need_bytes(self.in_flight[s]) for s in mine}
        return (budget_bytes - self.standing(rank)) * needs[stage] / sum(needs.values())

    def _plan(self, stage: int, room: float, budget_bytes: float) -> StageActions:
        try:
            return self.planners[stage].plan(int(room), self.in_flight[stage])
        except BudgetInfeasible as error:
            missing = max(error.min_bytes - int(room), 1)
            raise BudgetInfeasible(int(budget_bytes), int(budget_bytes) + missing, (), f", stage {stage}") from error

    def _corrected(
        self, rooms: Sequence[float], made: Realised, over: Sequence[float], budget_bytes: float
    ) -> list[float]:
        """Less room where a rank is over (a little less than that, so that few rounds do); once all fit, more where one
        recomputes and has more than a hundredth left."""
        changed = list(rooms)
        for stage, rank in enumerate(self.rank_of):
            share = self.rank_of.count(rank)
            if over[rank] > 0:
                changed[stage] -= (over[rank] + 0.002 * budget_bytes) / share + 1
            elif max(over) <= 0 and made.stages[stage].extra_s > 0 and over[rank] < -0.01 * budget_bytes:
                changed[stage] -= 0.9 * max(over[rank], made.peak_bytes[rank] - budget_bytes) / share
        return changed

    def realised(self, stages: Sequence[StageActions]) -> Realised:
        """These stages with every rank's memory played and the step simulated."""
        of, graphs = self.of, self.graphs
        of.effort.spend(_PLAYED_S * sum(map(len, self.transfers)))
        found = {g.index: of.bytes_of(g, self.positions, a) for g, a in zip(graphs, stages, strict=True)}

        def canonical(at: StageBytes, name: str) -> str:
            return of.pipeline.canonical(at.graph, name)

        plays = [
            RankPlay(rank, self.transfers, self.rank_of, found, canonical, self.beside[rank])
            for rank in range(self.schedule.num_devices)
        ]
        costs = [self._cost(graph, actions) for graph, actions in zip(graphs, stages, strict=True)]
        return Realised(
            self.positions, self.schedule, tuple(stages), tuple(play.peak_bytes for play in plays),
            self.in_flight, simulate(self.schedule, costs, of.cluster), tuple(tuple(play.moments) for play in plays),
        )  # fmt: skip

    def _cost(self, graph: StageGraph, actions: StageActions) -> StageCost:
        forward, back = ([float(v.nbytes) for v in graph.values(names)] for names in (graph.sends, graph.grad_sends))
        weight_s = actions.backward_s * _weight_share(*self.of.split_of(graph, self.positions, actions.fissions))
        return StageCost(
            actions.forward_s, actions.backward_s, actions.backward_s - weight_s, weight_s, 0.0, actions.saved_bytes,
            sum(back), sum(forward), 0.0, 0.0,
        )  # fmt: skip


def _weight_share(graph: StageGraph, program: Program) -> float:
    """The part of backward's seconds that nothing sent upstream waits for."""
    needed = {op.index for op in program.ops if op.name in set(graph.grad_sends)}
    total = late = 0.0
    for op in reversed(program.ops):
        if op.index in needed:
            needed.update(op.args)
        if op.region == "backward":
            total += op.seconds
            late += op.seconds if op.index not in needed else 0.0
    return late / total if total else 0.0
