"""Plans of one captured model at one number of microbatches: the chain proposes, real stages are planned and played."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.analysis import cost
from fxmem.analysis.devices import device_spec
from fxmem.analysis.doctor import machine
from fxmem.errors import BudgetInfeasible
from fxmem.ir.from_fx import program_from_joint
from fxmem.pipelining.bound import lower_bound_s
from fxmem.pipelining.chain import Cluster, Link
from fxmem.pipelining.model_chain import model_chain
from fxmem.pipelining.partition.auto import TWO_STAGES as TWO_STAGES_TRIED
from fxmem.pipelining.partition.auto import Effort
from fxmem.pipelining.partition.base import Problem
from fxmem.pipelining.partition.fixed import leanest, plan_fixed
from fxmem.pipelining.partition.proposals import least_memory
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.realise import Beside, Realised, Realiser
from fxmem.pipelining.registry import plan_pipeline
from fxmem.pipelining.schedules import Schedule, gpipe, one_f_one_b, one_f_one_b_n, torch_schedule
from fxmem.planners import Options
from fxmem.planners import effort as planning
from fxmem.runtime.pipeline.pipeline import Pipeline
from fxmem.schedule import Machine
from fxmem.schedule.actions import Tier
from fxmem.step.resident import optimizer_bytes, storage_bytes

LINKS = {"cpu": Link(1e-4, 2e9), "cuda": Link(20e-6, 25e9)}
"""Between neighbours, where nothing is known: gloo through loopback; a 200 Gb/s network."""
TWO_STAGES = (*TWO_STAGES_TRIED, "looped-bfs")
NO_LIMIT = float(2**62)
_MOST_BLOCKS = 96
_NUM_ATTEMPTS = 4
_STAGE_SOLVE_S, _STAGES_SOLVE_S = 0.5, 4.0
"""Default time limits of a try to plan one stage, and of one for every device."""
_OP_S, _BLOCK_S = 2e-3, 2e-4
"""Effort of capturing an op, and of proposing: for every block, device and microbatch of the chain."""


@dataclass(frozen=True)
class Request:
    """The checked arguments of `fxmem.pipeline`. `microbatch_counts`: one, or those to choose from. `splits`: may
    stages run regions in parts?
    """

    num_devices: int
    microbatch_counts: tuple[int, ...]
    budget: int | float | Literal["min"] | None
    schedule: str
    planner: str
    stage_planner: str
    device_spec: str | Path | None
    solve_s: float | None
    tiers: tuple[Tier, ...] = ()
    offload_dir: str | Path | None = None
    splits: bool = False


class Proposal(NamedTuple):
    """A kind of schedule with the chain's plan, made for devices of `memory_bytes`; no plan if none fits."""

    kind: str
    memory_bytes: float
    plan: PipelinePlan | None
    failure: BudgetInfeasible | None


class ModelPlanner:
    """Plans `runtime`, which was captured for `num_microbatches`."""

    def __init__(
        self,
        runtime: Pipeline,
        request: Request,
        num_microbatches: int,
        batch: Sequence[Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        effort: planning.Effort | None = None,
    ) -> None:
        self.runtime, self.request, self.num_microbatches = runtime, request, num_microbatches
        self._effort = effort or planning.Effort()
        tensors = [*model.parameters(), *model.buffers(), *batch]
        may_run = not any(t.is_meta or isinstance(t, compat.FakeTensor) for t in tensors)
        trained = storage_bytes(p for p in model.parameters() if p.requires_grad)
        self._beside = Beside(
            batch_bytes=sum(t.nbytes for t in batch),
            optimizer_share=optimizer_bytes(optimizer) / max(trained, 1),
            has_gradients=any(p.grad is not None for p in model.parameters()),
            rounding=self._rounding(),
        )
        limit_s = cost.PROFILE_LIMIT_S if may_run and request.device_spec is None else 0.0
        joint = runtime.joint
        annotate = functools.partial(cost.annotate, device_spec=request.device_spec, limit_s=limit_s)
        program = annotate(program_from_joint(joint), joint.graph_module)
        stages = request.num_devices * (2 if request.schedule in TWO_STAGES else 1)
        most = max(min(_MOST_BLOCKS, 12 * stages), stages)
        self._chain = model_chain(joint, program, lambda name: self._static_sizes.get(name, 0.0), most, stages)
        self._cluster = Cluster(request.num_devices, 1.0, LINKS["cpu" if self._is_cpu() else "cuda"])
        solve_s = request.solve_s or min(_STAGE_SOLVE_S, _STAGES_SOLVE_S / request.num_devices)
        options = Options(solve_s=solve_s, tiers=request.tiers, machine=self._machine(), effort=self._effort)
        self._effort.spend(_OP_S * len(program.ops))
        self.realiser = Realiser(
            runtime, program, self._beside, self._cluster, request.stage_planner, options, annotate, limit_s
        )

    def _rounding(self) -> int:
        if self.request.device_spec is not None:
            return device_spec(self.request.device_spec).rounding_bytes
        return 512 if self.runtime.joint_device.type == "cuda" else 1

    def _machine(self) -> Machine:
        """Links of the tiers; their room is shared by all that may be in flight, with at most two stages a device."""
        request = self.request
        if not request.tiers:
            return Machine()
        found = machine(request.tiers, request.offload_dir, request.device_spec)
        share = 2 * request.num_devices * self.num_microbatches
        return Machine(found.links, {tier: room // share for tier, room in found.capacity_bytes.items()})

    def _is_cpu(self) -> bool:
        spec = self.request.device_spec
        kind = device_spec(spec).device if spec is not None else self.runtime.joint_device.type
        return kind.startswith("cpu")

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

    def problem(self, memory_bytes: float) -> Problem:
        cluster = replace(self._cluster, memory_bytes=memory_bytes)
        chain = replace(self._chain.chain, input_bytes=self._beside.batch_bytes / self.num_microbatches)
        return Problem(chain, cluster, self.num_microbatches)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The schedules to try: all that there are, if neither schedule nor planner was named."""
        request = self.request
        if (request.schedule, request.planner) != ("auto", "auto"):
            return (request.schedule,)
        two = TWO_STAGES_TRIED if len(self._chain.chain) >= 2 * request.num_devices > 2 else ()
        return ("1f1b-n", "zero-bubble", *two)

    def propose(self, kind: str, budget: float) -> Proposal:
        """The chain's plan under `budget`."""
        try:
            return Proposal(kind, budget, self._plan(kind, budget), None)
        except BudgetInfeasible as error:
            return Proposal(kind, budget, None, error)

    def propose_larger(self, refused: Proposal) -> Proposal:
        """The chain's plan for as much as it says it needs, if that isn't far more: real stages may need less."""
        kind, budget, _, failure = refused
        memory = 1.02 * failure.min_bytes if failure else budget
        if not budget < memory <= 4 * budget:
            return refused
        larger = self.propose(kind, memory)
        return larger._replace(failure=failure) if larger.plan else refused

    def _plan(self, kind: str, memory_bytes: float) -> PipelinePlan:
        """The chain's plan by the planner asked for and that kind of schedule. Raises BudgetInfeasible."""
        request, problem = self.request, self.problem(memory_bytes)
        self._effort.spend(_BLOCK_S * len(problem.chain) * request.num_devices * self.num_microbatches)
        if kind in ("auto", "1f1b-n", "zero-bubble"):
            if request.planner != "auto":
                return plan_pipeline(problem.chain, problem.cluster, self.num_microbatches, planner=request.planner)
            effort = Effort() if len(problem.chain) <= 50 else Effort(1, 100, 10)
            return plan_pipeline(
                problem.chain, problem.cluster, self.num_microbatches, schedules=(kind,), effort=effort
            )
        cuts: tuple[int, ...] = ()
        if request.planner != "auto" and kind not in TWO_STAGES:
            cuts = plan_pipeline(problem.chain, problem.cluster, self.num_microbatches, planner=request.planner).cuts
        return plan_fixed(problem, self._fixed(kind), cuts)

    def _fixed(self, kind: str) -> Schedule:
        devices, count = self.request.num_devices, self.num_microbatches
        if kind == "gpipe":
            return gpipe(devices, count)
        if kind == "1f1b":
            return one_f_one_b(devices, count)
        return torch_schedule(kind, devices, count, 2)

    def realise(self, proposal: Proposal, budget: float, fastest_s: float) -> tuple[Realised, float] | None:
        """Stages of the proposal and the bound on their step, planned again for less memory where real stages need
        more than the chain says; None if the chain has nothing faster than `fastest_s`. Raises BudgetInfeasible.
        """
        kind, memory, plan, failure = proposal
        for _ in range(_NUM_ATTEMPTS):
            if plan is None:
                break
            if plan.step_s >= fastest_s:
                return None
            try:
                return self.realiser.realise(self._chain.cuts(plan.cuts), plan.schedule, budget), plan.bound_s
            except BudgetInfeasible as error:
                failure = error
            memory -= max(failure.min_bytes - budget, 0.02 * memory)
            if proposal.memory_bytes > budget or memory <= 0:
                break
            try:
                plan = self._plan(kind, memory)
            except BudgetInfeasible as error:
                failure = failure or error
                break
        assert failure is not None
        raise failure

    def whole_bytes(self) -> int:
        """The largest rank's peak with nothing recomputed under 1F1B."""
        plan = plan_fixed(self.problem(NO_LIMIT), one_f_one_b(self.request.num_devices, self.num_microbatches))
        return max(self.realiser.realise(self._chain.cuts(plan.cuts), plan.schedule, NO_LIMIT).peak_bytes)

    def lean(self) -> Realised:
        """One microbatch in flight, cut for least memory; or the schedule asked for if it has no choice, cut so or for
        speed, whichever needs less.
        """
        request, problem = self.request, self.problem(NO_LIMIT)
        if request.schedule not in ("auto", "1f1b-n", "zero-bubble"):
            schedule = self._fixed(request.schedule)
            both = {plan_fixed(problem, schedule).cuts, leanest(problem, schedule)}
            made = (self.realiser.smallest(self._chain.cuts(some), schedule) for some in sorted(both))
            return min(made, key=lambda realised: max(realised.peak_bytes))
        ones = [1] * request.num_devices
        cuts = least_memory(problem.table(problem.evaluator()), ones)
        return self.realiser.smallest(self._chain.cuts(cuts), one_f_one_b_n(ones, self.num_microbatches))

    def bound_s(self) -> float:
        problem = self.problem(NO_LIMIT)
        return lower_bound_s(problem.chain, problem.cluster, problem.num_microbatches, split=True)
