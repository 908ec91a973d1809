"""From a captured model to a pipeline plan: chain, cuts, schedule, and stages that fit, one rank deciding for all."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxmem.errors import BudgetInfeasible, FxmemError, OptionError, PlanMismatch
from fxmem.passes.stage_split import Cuts, StageGraph
from fxmem.pipelining.model_plan import NO_LIMIT, TWO_STAGES, ModelPlanner, Proposal, Request
from fxmem.pipelining.realise import Realised
from fxmem.pipelining.stage_forms import split_stage
from fxmem.planners.effort import Effort
from fxmem.report.pipeline import START, PipelineFigures, Segment, write_pipeline
from fxmem.runtime.pipeline.pipeline import Pipeline
from fxmem.schedule import Action
from fxmem.step.candidates import described
from fxmem.units import format_bytes

Rows = list[list[str]]
_NEAR = 1.05
"""What stages in parts are tried for: proposals that are at most so much slower than the best with stages whole."""
_PATIENCE_S = 60.0
"""Effort (see `fxmem.planners.effort`) after which no further number of microbatches or kind of schedule is tried."""


@dataclass(frozen=True)
class StageResult:
    """One stage. `cut`: the op it begins with; `peak_bytes`: of its rank; `busy_s`: seconds of one microbatch, of which
    `extra_s` recomputing, waiting for transfers of `moved_bytes` or because ops are split; `saved_bytes`: held by each
    of `in_flight` microbatches; `static_bytes`: parameters and buffers; `split`: the regions in parts, in words.
    """

    index: int
    rank: int
    cut: str
    num_ops: int
    peak_bytes: int
    static_bytes: int
    saved_bytes: int
    send_bytes: int
    in_flight: int
    busy_s: float
    extra_s: float
    moved_bytes: int
    split: tuple[str, ...] = ()


class Tried(NamedTuple):
    """A kind of schedule with a number of microbatches, and the step that the chain promised; None: nothing fits."""

    schedule: str
    num_microbatches: int
    step_s: float | None


@dataclass(frozen=True)
class PipelineResult:
    """What was decided. `peak_bytes`: predicted, per rank; `gap`: step over the chain's lower bound, less one; `tried`:
    what it was chosen from; `lanes`: what every rank runs, when, and the bytes that stand there.
    """

    stages: tuple[StageResult, ...]
    schedule: str
    num_microbatches: int
    budget_bytes: int | None
    peak_bytes: tuple[int, ...]
    step_s: float
    bound_s: float
    bubble: float
    solve_s: float
    tried: tuple[Tried, ...] = ()
    lanes: tuple[tuple[Segment, ...], ...] = ()

    @property
    def gap(self) -> float:
        return self.step_s / self.bound_s - 1

    def report(self, path: str | Path) -> None:
        """Write an HTML report: every rank's schedule and memory, the stages, what they were chosen from."""
        write_pipeline(self._pages(), self.lanes, self.budget_bytes, Path(path))

    def _pages(self) -> PipelineFigures:
        head, *rows = str(self).splitlines()
        return PipelineFigures(head, tuple(row.strip() for row in rows), self.peak_bytes)

    def __str__(self) -> str:
        budget = "no budget" if self.budget_bytes is None else f"budget {format_bytes(self.budget_bytes)}"
        lines = [
            f"{len(self.stages)} stages on {len(self.peak_bytes)} devices, {self.schedule}, {self.num_microbatches} "
            f"microbatches, {budget}: step {self.step_s:.4f} s, bubble {self.bubble:.1%}, gap {self.gap:.1%}"
        ]
        for s in self.stages:
            lines.append(
                f"  stage {s.index} on rank {s.rank}, from {s.cut}: peak {format_bytes(s.peak_bytes)}, parameters "
                f"{format_bytes(s.static_bytes)}, {s.in_flight} x {format_bytes(s.saved_bytes)} in flight, "
                f"{s.busy_s:.4f} s a microbatch ({s.extra_s:.4f} s of it again or waiting)"
                + (f", {format_bytes(s.moved_bytes)} moved" if s.moved_bytes else "")
            )
            lines += [f"    split: {region}" for region in s.split]
        if len(self.tried) > 1:
            steps = (
                f"{t.schedule} x {t.num_microbatches} {'does not fit' if t.step_s is None else f'{t.step_s:.4f} s'}"
                for t in self.tried
            )
            lines.append(f"  chosen from (steps of the chain): {', '.join(steps)}")
        return "\n".join(lines)


class Found(NamedTuple):
    """The budget in bytes, the planner that found stages that fit it, those, and a lower bound on the step."""

    budget_bytes: int | None
    planner: ModelPlanner
    stages: Realised
    bound_s: float


class _NothingFaster(Exception):
    """What has been found already is the best."""


class Driver:
    """Plans a model and cuts it accordingly; `make(n)` captures it for n microbatches. `runtime` comes with `run`."""

    runtime: Pipeline

    def __init__(
        self,
        make: Callable[[int], Pipeline],
        request: Request,
        batch: Sequence[Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._make, self.request = make, request
        self._inputs = batch, model, optimizer
        self._effort = Effort()
        self._since_s = 0.0
        self._tried: list[Tried] = []
        self._last_cut: tuple[Cuts, Rows, Sequence[int]] | None = None

    def run(self) -> PipelineResult:
        """Decide (in a process group on rank 0 alone) and cut. Raises what `fxmem.pipeline` raises."""
        counts = self.request.microbatch_counts
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            if len(counts) == 1:
                self.runtime = self._make(counts[0])
            self._apply(decided := self._decide())
            return decided[0]
        _agree(_asked(self.request))
        if len(counts) == 1:
            self._make_alike(counts[0])
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                box[0] = self._decide()
            except FxmemError as error:
                box[0] = (type(error), error.__dict__, str(error))
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0][0], type):
            kind, noted, message = box[0]
            failure = kind.__new__(kind, message)
            failure.args = (message,)
            failure.__dict__.update(noted)
            raise failure
        result: PipelineResult = box[0][0]
        if len(counts) > 1:
            self._make_alike(result.num_microbatches)
        self._apply(box[0])
        return result

    def _make_alike(self, num_microbatches: int) -> None:
        """Capture the model on every rank (rank 0 may have before). Raises OptionError where the graphs differ, and
        what capture raises; on all ranks, if on one."""
        failure: FxmemError | None = None
        try:
            if not hasattr(self, "runtime"):
                self.runtime = self._make(num_microbatches)
        except FxmemError as error:
            failure = error
        captured = str(failure) if failure else f"the graph {self.runtime.joint.fingerprint}"
        try:
            _agree({"captured": captured})
        except OptionError as error:
            raise failure or error from None
        if failure is not None:
            raise failure

    def _apply(self, decided: tuple[PipelineResult, Any]) -> None:
        _, (positions, rows, rank_of, actions, fissions) = decided
        self._cut(positions, rows, rank_of)
        captured = [_targets(graph) for graph in self.runtime.stage_graphs]
        targets = [_targets(split_stage(g, f)) for g, f in zip(self.runtime.stage_graphs, fissions, strict=True)]

        def in_parts(graph: StageGraph) -> StageGraph:
            """Other shapes of microbatches as well, unless they have too few rows, or other ops."""
            if _targets(graph) == captured[graph.index]:
                with contextlib.suppress(PlanMismatch):
                    return split_stage(graph, fissions[graph.index])
            return graph

        def plan_stage(graph: StageGraph, program: object) -> Sequence[Action] | None:
            """The same schedule for every shape of microbatch whose graph has the same ops."""
            return actions[graph.index] if _targets(graph) == targets[graph.index] else None

        self.runtime.split_stage, self.runtime.plan_stage = in_parts, plan_stage
        self.runtime.offload_dir = self.request.offload_dir

    def _cut(self, positions: Cuts, rows: Rows, rank_of: Sequence[int]) -> None:
        """Cut the runtime, unless that is how it was cut last."""
        wanted = (positions, rows, rank_of)
        if self._last_cut != wanted:
            self.runtime.cut(positions, "actions", rows, rank_of)
        self._last_cut = wanted

    def _decide(self) -> tuple[PipelineResult, Any]:
        started = time.perf_counter()
        budget, planner, found, bound_s = self._search()
        self.runtime = planner.runtime
        rows = found.schedule.as_csv_rows()
        self._cut(found.positions, rows, found.schedule.device_of)
        result = self._result(planner.num_microbatches, found, budget, bound_s, time.perf_counter() - started)
        actions, fissions = [stage.actions for stage in found.stages], [stage.fissions for stage in found.stages]
        return result, (found.positions, rows, found.schedule.device_of, actions, fissions)

    def _planners(self) -> Iterator[ModelPlanner]:
        """One for each number of microbatches, made when it is asked for; after the first, only while there is time.

        Raises what the last one raised if none can be made.
        """
        counts, made, failure = self.request.microbatch_counts, 0, None
        for count in counts:
            if made and self._effort.now() > _PATIENCE_S / 2:
                return
            try:
                runtime = self.runtime if len(counts) == 1 else self._make(count)
                planner = ModelPlanner(runtime, self.request, count, *self._inputs, self._effort)
            except FxmemError as error:
                failure = error
                continue
            made += 1
            yield planner
        if not made and failure is not None:
            raise failure

    def _search(self) -> Found:
        """What is found with every stage whole; where that costs time or does not fit, what is with stages in parts, if
        that is better. Raises what `_among` raises."""
        made: list[ModelPlanner] = []

        def kept() -> Iterator[ModelPlanner]:
            for planner in self._planners():
                made.append(planner)
                yield planner

        try:
            whole: Found | BudgetInfeasible = self._among(kept())
        except BudgetInfeasible as error:
            whole = error
        is_free = isinstance(whole, Found) and not any(stage.extra_s for stage in whole.stages.stages)
        if self.request.splits and not is_free:
            whole = self._better(whole, made)
        if isinstance(whole, BudgetInfeasible):
            raise whole
        return whole

    def _better(self, whole: Found | BudgetInfeasible, planners: Sequence[ModelPlanner]) -> Found | BudgetInfeasible:
        """`whole`, or what is found with stages in parts: smaller for the smallest budget, else faster."""
        for planner in planners:
            planner.realiser.splits = True
        self._since_s = self._effort.now()
        most_s = float("inf") if isinstance(whole, BudgetInfeasible) else _NEAR * whole.stages.step_s
        try:
            split = self._among(iter(planners), most_s)
        except _NothingFaster:
            return whole
        except BudgetInfeasible as error:
            return min(whole, error, key=lambda e: e.min_bytes) if isinstance(whole, BudgetInfeasible) else whole
        if isinstance(whole, BudgetInfeasible):
            return split
        is_least = self.request.budget == "min"
        return min(whole, split, key=lambda f: max(f.stages.peak_bytes) if is_least else f.stages.step_s)

    def _among(self, planners: Iterator[ModelPlanner], most_s: float = float("inf")) -> Found:
        """The best that the planners find, of proposals with steps of `most_s` at most.

        Raises BudgetInfeasible naming the stage and the smallest budget found, _NothingFaster where there are none.
        """
        budget = self.request.budget
        first = next(planners)
        if budget == "min":
            leans = [(planner, planner.lean()) for planner in (first, *planners)]
            planner, lean = min(leans, key=lambda pair: max(pair[1].peak_bytes))
            return Found(max(lean.peak_bytes), planner, lean, planner.bound_s())
        if isinstance(budget, float):
            budget = int(budget * first.whole_bytes())
        limit = NO_LIMIT if budget is None else budget
        return Found(budget, *self._under(limit, itertools.chain([first], planners), most_s))

    def _under(
        self, budget: float, planners: Iterator[ModelPlanner], most_s: float
    ) -> tuple[ModelPlanner, Realised, float]:
        """The fastest stages under `budget` over the kinds of schedules and the numbers of microbatches: the chain
        proposes, what it says is fastest is realised first. The bound holds for all that was proposed. At last the cut
        of least memory.

        Raises BudgetInfeasible naming the stage and the smallest budget found.
        """
        proposals: list[tuple[ModelPlanner, Proposal]] = []
        made: list[ModelPlanner] = []
        for planner in planners:
            made.append(planner)
            proposals += [(planner, proposal) for proposal in self._proposals(planner, budget)]
        failure = next((proposal.failure for _, proposal in proposals), None)
        if not any(proposal.plan for _, proposal in proposals):
            proposals = [(planner, planner.propose_larger(proposal)) for planner, proposal in proposals]
        has_single = any(proposal.plan and proposal.kind not in TWO_STAGES for _, proposal in proposals)
        found: tuple[ModelPlanner, Realised, float] | None = None
        for planner, proposal in sorted(proposals, key=lambda pair: _promised_s(pair[1])):
            if proposal.plan is None or proposal.plan.step_s > most_s:
                break
            late = self._effort.now() - self._since_s > _PATIENCE_S
            if found and late:
                break
            if late and proposal.kind in TWO_STAGES and has_single:  # what has no room to give way misses most often
                continue
            try:
                realised = planner.realise(proposal, budget, found[1].step_s if found else float("inf"))
            except BudgetInfeasible as error:
                failure = failure or error
                continue
            if realised and (found is None or realised[0].step_s < found[1].step_s):
                found = planner, *realised
        if found:
            return *found[:2], min([found[2], *(p.plan.bound_s for _, p in proposals if p.plan)])
        if most_s < float("inf"):
            raise _NothingFaster
        leans = [(planner, planner.lean()) for planner in made]
        planner, lean = min(leans, key=lambda pair: max(pair[1].peak_bytes))
        if max(lean.peak_bytes) <= budget:
            return planner, lean, planner.bound_s()
        raise lean.infeasible(int(budget)) from failure

    def _proposals(self, planner: ModelPlanner, budget: float) -> Iterator[Proposal]:
        """One a kind of schedule, those left out that torch can't lay out. Raises OptionError if it was asked for."""
        for kind in planner.kinds:
            try:
                proposal = planner.propose(kind, budget)
            except OptionError:
                if len(planner.kinds) == 1:
                    raise
                continue
            step_s = proposal.plan.step_s if proposal.plan else None
            tried = Tried(kind, planner.num_microbatches, step_s)
            self._tried += [tried] if tried not in self._tried else []
            yield proposal

    def _result(
        self, num_microbatches: int, found: Realised, budget: int | None, bound_s: float, solve_s: float
    ) -> PipelineResult:
        runtime = self.runtime
        starts = ["the inputs", *(runtime.joint.nodes[p].name for p in found.positions)]
        stages = tuple(
            StageResult(
                index=graph.index,
                rank=(rank := found.schedule.device_of[graph.index]),
                cut=starts[graph.index],
                num_ops=sum(node.op == "call_function" for node in graph.joint.nodes),
                peak_bytes=found.peak_bytes[rank],
                static_bytes=sum(runtime.tensors[runtime.canonical(graph, n)].nbytes for n in graph.statics),
                saved_bytes=planned.saved_bytes,
                send_bytes=sum(v.nbytes for v in graph.values(graph.sends)),
                in_flight=count,
                busy_s=planned.forward_s + planned.backward_s,
                extra_s=planned.extra_s,
                moved_bytes=planned.moved_bytes,
                split=tuple(described(graph.joint, planned.fissions)),
            )
            for graph, planned, count in zip(runtime.stage_graphs, found.stages, found.in_flight, strict=True)
        )
        run = found.simulation
        return PipelineResult(
            stages, found.schedule.name, num_microbatches, budget, found.peak_bytes, run.step_s,
            min(bound_s, run.step_s), run.bubble, solve_s, tuple(self._tried), lanes_of(found),
        )  # fmt: skip


def lanes_of(found: Realised) -> tuple[tuple[Segment, ...], ...]:
    """Per rank, each action that computes with its start and end; messages before it count as its own."""
    times: dict[tuple[int, str, int], tuple[float, float]] = {}
    for _, action, start, end in found.simulation.timeline():
        times[action.stage, action.kind, action.microbatch] = start, end
    lanes = []
    for moments in found.moments:
        lane: list[Segment] = []
        waiting = 0
        for stage, kind, microbatch, peak_bytes, level_bytes in moments:
            waiting = max(waiting, peak_bytes)
            if kind == START:
                lane.append(Segment(stage, kind, microbatch, 0.0, 0.0, peak_bytes, level_bytes))
            elif (stage, kind, microbatch) in times:
                start, end = times[stage, kind, microbatch]
                lane.append(Segment(stage, kind, microbatch, start, end, waiting, level_bytes))
                waiting = 0
        if lane and waiting > lane[-1].peak_bytes:
            lane[-1] = lane[-1]._replace(peak_bytes=waiting)
        lanes.append(tuple(lane))
    return tuple(lanes)


def _agree(mine: Mapping[str, str]) -> None:
    """Raises OptionError on all ranks of the default process group unless all give the same words."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(mine))
    for rank, asked in enumerate(everyone):
        for what, value in asked.items():
            if value != everyone[0][what]:
                raise OptionError(
                    f"all ranks must plan alike: rank {rank} has {what} {value}, rank 0 {everyone[0][what]}"
                )


def _asked(request: Request) -> dict[str, str]:
    """What the ranks must agree on, in words; each may have a folder of its own to offload to."""
    return {f.name: str(getattr(request, f.name)) for f in fields(request) if f.name != "offload_dir"}


def _promised_s(proposal: Proposal) -> float:
    return proposal.plan.step_s if proposal.plan else float("inf")


def _targets(graph: StageGraph) -> list[str]:
    return [str(node.target) for node in graph.joint.nodes]
