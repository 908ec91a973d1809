"""From a captured model to a pipeline plan: chain, cuts, schedule, and stages that fit, one rank deciding for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxmem import compat
from fxmem.analysis import cost
from fxmem.analysis.devices import device_spec
from fxmem.doctor import machine
from fxmem.errors import BudgetInfeasible, FxmemError
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes.stage_split import StageGraph
from fxmem.pipelining.bound import lower_bound_s
from fxmem.pipelining.chain import Cluster, Link
from fxmem.pipelining.model_chain import model_chain
from fxmem.pipelining.partition.auto import Effort
from fxmem.pipelining.partition.base import Problem
from fxmem.pipelining.partition.fixed import plan_fixed
from fxmem.pipelining.partition.proposals import least_memory
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.realise import Beside, Realised, Realiser
from fxmem.pipelining.registry import plan_pipeline
from fxmem.pipelining.schedules import Schedule, gpipe, one_f_one_b, one_f_one_b_n, torch_schedule
from fxmem.planners import Options
from fxmem.resident import optimizer_bytes, storage_bytes
from fxmem.runtime.pipeline import Pipeline
from fxmem.schedule import Action, Machine
from fxmem.schedule.actions import Tier
from fxmem.units import format_bytes

LINKS = {"cpu": Link(1e-4, 2e9), "cuda": Link(20e-6, 25e9)}
"""Between neighbours, where nothing is known: gloo through loopback; a 200 Gb/s network."""
TWO_STAGES = ("interleaved", "interleaved-zb", "looped-bfs", "zbv", "dualpipev")
_MOST_BLOCKS = 96
_NO_LIMIT = float(2**62)
_PATIENCE_S = 30.0
"""Seconds after which no further kind of schedule is tried."""
_NUM_ATTEMPTS = 4


@dataclass(frozen=True)
class Request:
    """The checked arguments of `fxmem.pipeline`."""

    num_devices: int
    num_microbatches: int
    budget: int | float | Literal["min"] | None
    schedule: str
    planner: str
    stage_planner: str
    device_spec: str | Path | None
    solve_s: float | None
    tiers: tuple[Tier, ...] = ()
    offload_dir: str | Path | None = None


@dataclass(frozen=True)
class StageResult:
    """One stage. `cut`: the op it begins with; `peak_bytes`: of its rank; `busy_s`: seconds of one microbatch, of which
    `extra_s` recomputing or waiting for transfers of `moved_bytes`; `saved_bytes`: held by each of `in_flight`
    microbatches; `static_bytes`: parameters and buffers.
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


@dataclass(frozen=True)
class PipelineResult:
    """What was decided. `peak_bytes`: predicted, per rank; `gap`: step over the chain's lower bound, less one."""

    stages: tuple[StageResult, ...]
    schedule: str
    num_microbatches: int
    budget_bytes: int | None
    peak_bytes: tuple[int, ...]
    step_s: float
    bound_s: float
    bubble: float
    solve_s: float

    @property
    def gap(self) -> float:
        return self.step_s / self.bound_s - 1

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
        return "\n".join(lines)


class Driver:
    """Plans `runtime`, and cuts it accordingly."""

    def __init__(
        self,
        runtime: Pipeline,
        request: Request,
        batch: Sequence[Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.runtime, self.request = runtime, request
        tensors = [*model.parameters(), *model.buffers(), *batch]
        self._may_run = not any(t.is_meta or isinstance(t, compat.FakeTensor) for t in tensors)
        trained = storage_bytes(p for p in model.parameters() if p.requires_grad)
        self._device = runtime.joint_device
        self._beside = Beside(
            batch_bytes=sum(t.nbytes for t in batch),
            optimizer_share=optimizer_bytes(optimizer) / max(trained, 1),
            has_gradients=any(p.grad is not None for p in model.parameters()),
            rounding=self._rounding(),
        )

    def _rounding(self) -> int:
        if self.request.device_spec is not None:
            return device_spec(self.request.device_spec).rounding_bytes
        return 512 if self._device.type == "cuda" else 1

    def run(self) -> PipelineResult:
        """Decide (in a process group on rank 0 alone) and cut. Raises what `fxmem.pipeline` raises."""
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            self._apply(decided := self._decide())
            return decided[0]
        box: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                box[0] = self._decide()
            except FxmemError as error:
                box[0] = (type(error), error.__dict__, str(error))
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0][0], type):
            kind, fields, message = box[0]
            failure = kind.__new__(kind, message)
            failure.args = (message,)
            failure.__dict__.update(fields)
            raise failure
        self._apply(box[0])
        result: PipelineResult = box[0][0]
        return result

    def _apply(self, decided: tuple[PipelineResult, Any]) -> None:
        _, (positions, rows, rank_of, actions) = decided
        self.runtime.cut(positions, "actions", rows, rank_of)
        first = self.runtime.stage_graphs
        targets = [_targets(graph) for graph in first]

        def plan_stage(graph: StageGraph, program: object) -> Sequence[Action] | None:
            """The same schedule for every shape of microbatch whose graph has the same ops."""
            return actions[graph.index] if _targets(graph) == targets[graph.index] else None

        self.runtime.plan_stage = plan_stage
        self.runtime.offload_dir = self.request.offload_dir

    def _decide(self) -> tuple[PipelineResult, Any]:
        started = self._started = time.perf_counter()
        request, joint = self.request, self.runtime.joint
        program = program_from_joint(joint)
        limit_s = cost.PROFILE_LIMIT_S if self._may_run and request.device_spec is None else 0.0
        self._program = cost.annotate(program, joint.graph_module, request.device_spec, limit_s=limit_s)
        stages = request.num_devices * (2 if request.schedule in TWO_STAGES else 1)
        most = max(min(_MOST_BLOCKS, 12 * stages), stages)
        self._chain = model_chain(joint, self._program, self._static_bytes, most, stages)
        self._cluster = Cluster(request.num_devices, 1.0, LINKS["cpu" if self._is_cpu() else "cuda"])
        options = Options(solve_s=request.solve_s or 0.5, tiers=request.tiers, machine=self._machine(stages))
        self._realiser = Realiser(
            self.runtime, self._program, self._beside, self._cluster, request.stage_planner, options, limit_s
        )
        budget, found, bound_s = self._search()
        result = self._result(found, budget, bound_s, time.perf_counter() - started)
        rows = found.schedule.as_csv_rows()
        actions = [stage.actions for stage in found.stages]
        return result, (found.positions, rows, found.schedule.device_of, actions)

    def _machine(self, num_stages: int) -> Machine:
        """Links of the tiers; their room is shared by everything that may be in flight."""
        request = self.request
        if not request.tiers:
            return Machine()
        found = machine(request.tiers, request.offload_dir, request.device_spec)
        share = num_stages * request.num_microbatches
        return Machine(found.links, {tier: room // share for tier, room in found.capacity_bytes.items()})

    def _is_cpu(self) -> bool:
        spec = self.request.device_spec
        return (device_spec(spec).device if spec is not None else self._device.type).startswith("cpu")

    def _static_bytes(self, placeholder: str) -> float:
        return self._static_sizes.get(placeholder, 0.0)

    @cached_property
    def _static_sizes(self) -> dict[str, float]:
        """Parameters and buffers by placeholder: bytes, with gradient and optimizer state if trained."""
        joint = self.runtime.joint
        inputs = [n for n in joint.nodes[: joint.num_forward_nodes] if n.op == "placeholder"]
        gradients = joint.outputs[joint.num_forward_outputs :]
        trained = {n.name for n, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
        times = 2 + self._beside.optimizer_share
        wanted = set(joint.static_inputs)
        sizes = {n.name: float(n.meta["val"].nbytes) for n in inputs if n.name in wanted}
        return {name: nbytes * (times if name in trained else 1) for name, nbytes in sizes.items()}

    def _search(self) -> tuple[int | None, Realised, float]:
        """(budget in bytes, stages that fit it, lower bound on the step)."""
        budget = self.request.budget
        if budget is None:
            return None, *self._under(_NO_LIMIT)
        if isinstance(budget, float):
            schedule = one_f_one_b(self.request.num_devices, self.request.num_microbatches)
            plan = plan_fixed(self._problem(_NO_LIMIT), schedule)
            whole = self._realiser.realise(self._chain.cuts(plan.cuts), plan.schedule, _NO_LIMIT)
            budget = int(budget * max(whole.peak_bytes))
        if budget == "min":
            lean = self._lean()
            return max(lean.peak_bytes), lean, self._bound()
        found, bound_s = self._under(int(budget))
        return int(budget), found, bound_s

    def _problem(self, memory_bytes: float) -> Problem:
        cluster = replace(self._cluster, memory_bytes=memory_bytes)
        chain = replace(self._chain.chain, input_bytes=self._beside.batch_bytes / self.request.num_microbatches)
        return Problem(chain, cluster, self.request.num_microbatches)

    @property
    def _kinds(self) -> tuple[str, ...]:
        """The schedules to try."""
        request = self.request
        is_free = (request.schedule, request.planner) == ("auto", "auto")
        return ("1f1b-n", "zero-bubble") if is_free else (request.schedule,)

    def _plan(self, kind: str, memory_bytes: float) -> PipelinePlan:
        """The chain's plan by the planner asked for and that kind of schedule. Raises BudgetInfeasible."""
        request, problem = self.request, self._problem(memory_bytes)
        if kind in ("auto", "1f1b-n", "zero-bubble"):
            if request.planner != "auto":
                return plan_pipeline(problem.chain, problem.cluster, request.num_microbatches, planner=request.planner)
            effort = Effort() if len(problem.chain) <= 50 else Effort(1, 200, 20, 10)
            return plan_pipeline(
                problem.chain, problem.cluster, request.num_microbatches, schedules=(kind,), effort=effort
            )
        cuts: tuple[int, ...] = ()
        if request.planner != "auto" and request.schedule not in TWO_STAGES:
            cuts = plan_pipeline(problem.chain, problem.cluster, request.num_microbatches, planner=request.planner).cuts
        return plan_fixed(problem, self._fixed(), cuts)

    def _fixed(self) -> Schedule:
        name, devices, count = self.request.schedule, self.request.num_devices, self.request.num_microbatches
        if name == "gpipe":
            return gpipe(devices, count)
        if name == "1f1b":
            return one_f_one_b(devices, count)
        return torch_schedule(name, devices, count, 2)

    def _under(self, budget: float) -> tuple[Realised, float]:
        """The fastest stages under `budget` over the kinds of schedules; at last the cut of least memory.

        Raises BudgetInfeasible naming the stage and the smallest budget found.
        """
        found: list[tuple[Realised, float]] = []
        failure: BudgetInfeasible | None = None
        for kind in self._kinds:
            if found and time.perf_counter() - self._started > _PATIENCE_S:
                break
            try:
                made = self._of_kind(kind, budget, min((f.step_s for f, _ in found), default=float("inf")))
            except BudgetInfeasible as error:
                failure = failure or error
                continue
            found += [made] if made is not None else []
        if found:
            return min(found, key=lambda pair: pair[0].step_s)
        lean = self._lean()
        if max(lean.peak_bytes) <= budget:
            return lean, self._bound()
        raise lean.infeasible(int(budget)) from failure

    def _of_kind(self, kind: str, budget: float, fastest_s: float) -> tuple[Realised, float] | None:
        """Stages of the chain's plan, planned again for other memory where real stages need more or less than the chain
        says; None if the chain has nothing faster than `fastest_s`. Raises BudgetInfeasible.
        """
        memory, failure = budget, None
        for _ in range(_NUM_ATTEMPTS):
            try:
                plan = self._plan(kind, memory)
            except BudgetInfeasible as error:
                failure = failure or error
                if memory != budget or error.min_bytes > 4 * budget:
                    break
                memory = 1.02 * error.min_bytes
                continue
            if plan.step_s >= fastest_s:
                return None
            try:
                return self._realiser.realise(self._chain.cuts(plan.cuts), plan.schedule, budget), plan.bound_s
            except BudgetInfeasible as error:
                failure = error
                if memory > budget:
                    break
                memory -= max(error.min_bytes - budget, 0.02 * memory)
                if memory <= 0:
                    break
        assert failure is not None
        raise failure

    def _lean(self) -> Realised:
        """One microbatch in flight (or the schedule asked for, if it has no choice), cut for least memory."""
        request, problem = self.request, self._problem(_NO_LIMIT)
        if request.schedule not in ("auto", "1f1b-n", "zero-bubble"):
            plan = plan_fixed(problem, self._fixed())
            return self._realiser.smallest(self._chain.cuts(plan.cuts), plan.schedule)
        ones = [1] * request.num_devices
        cuts = least_memory(problem.table(problem.evaluator()), ones)
        return self._realiser.smallest(self._chain.cuts(cuts), one_f_one_b_n(ones, request.num_microbatches))

    def _bound(self) -> float:
        problem = self._problem(_NO_LIMIT)
        return lower_bound_s(problem.chain, problem.cluster, problem.num_microbatches, split=True)

    def _result(self, found: Realised, budget: int | None, bound_s: float, solve_s: float) -> PipelineResult:
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
            )
            for graph, planned, count in zip(runtime.stage_graphs, found.stages, found.in_flight, strict=True)
        )
        run = found.simulation
        return PipelineResult(
            stages, found.schedule.name, self.request.num_microbatches, budget, found.peak_bytes, run.step_s,
            min(bound_s, run.step_s), run.bubble, solve_s,
        )  # fmt: skip


def _targets(graph: StageGraph) -> list[str]:
    return [str(node.target) for node in graph.joint.nodes]
