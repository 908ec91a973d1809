"""A compiled training step: plans each captured graph, verifies the measured peak, plans again when it is exceeded."""

from __future__ import annotations

import logging
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from fxmem import compat
from fxmem.budget import Budget, resolve_budget
from fxmem.capture import JointGraph
from fxmem.capture.errors import unwrapped_errors
from fxmem.errors import BudgetInfeasible, CaptureError
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.passes import rewrite
from fxmem.passes.offload import open_transfers
from fxmem.planners.plan import Plan
from fxmem.report.decisions import standing_at_peak
from fxmem.schedule import StartBackward
from fxmem.step.graph_plan import plan_graph
from fxmem.step.held_tensors import reachable_tensors, storages
from fxmem.step.lower import backend, split
from fxmem.step.measurement import MemoryTrace, device_of
from fxmem.step.resident import beside_graph_bytes, gradient_bytes, optimizer_bytes, parameters_of

NUM_RETRIES = 3
_MARGIN = 0.01  # of the budget, per retry after the first
_LOGGER = logging.getLogger("fxmem")


class Step:
    """What the graphs of one training step share: the budget, its verification, the plans.

    `measured_peak_bytes`: of the step that was verified. After a measurement over the budget `excess_bytes` more are
    taken to stand beside the graphs. `generation` counts how often everything was to be planned again.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        self.graphs: list[Graph] = []
        self.generation = 0
        self.excess_bytes = 0
        self.measured_peak_bytes: int | None = None
        self._trace: MemoryTrace | None = None
        self._start_bytes = 0
        self._failure: BudgetInfeasible | None = None
        self.parameters = parameters_of(function)
        self._gradient_bytes = 0
        self._optimizer_bytes = optimizer_bytes(settings.optimizer)
        self.num_retries = 0
        self._num_verified = 0

    @property
    def plans(self) -> list[Plan]:
        """One per captured training graph, in order of capture; until the next call those that the last one ran."""
        return [graph.plan for graph in self.graphs if graph.plan is not None]

    @property
    def _valid_plans(self) -> list[Plan]:
        """The plans made since everything was last to be planned again."""
        return [graph.plan for graph in self.graphs if graph.plan is not None and not graph.is_stale]

    @property
    def plan(self) -> Plan:
        """The plan in force; of several graphs, the one with the highest peak.

        Raises LookupError before the first training step.
        """
        if not self.plans:
            raise LookupError("nothing is planned before the first training step; fxmem.plan does it ahead of time")
        return max(self.plans, key=lambda plan: plan.peak_bytes)

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend of this step."""
        graph = Graph(self, module)
        self.graphs.append(graph)
        graph.compile(example_inputs)
        return graph

    def check(self, args: Sequence[Any]) -> None:
        """Before a graph runs with `args`: plan again if more gradients exist than the plans count on.

        Raises BudgetInfeasible if an earlier step was measured over the budget and no retry is left.
        """
        if self._failure is not None:
            raise self._failure
        existing_bytes = gradient_bytes([*self.parameters, *(x for x in args if isinstance(x, nn.Parameter))])
        if existing_bytes > self._gradient_bytes:
            self._gradient_bytes = existing_bytes
            self.plan_again()

    def call(self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`compiled(*args, **kwargs)`. Raises CaptureError if Dynamo gave up and ran the model as it is."""
        try:
            with unwrapped_errors():
                result = compiled(*args, **kwargs)
        except BaseException:
            if self._trace is not None:  # the backward that would end it may never come, though its roots live on
                self._trace.abandon()
            raise
        if torch.is_grad_enabled() and self.settings.budget is not None and not self.graphs:
            raise CaptureError("Dynamo found no graph in the step, so it ran without a plan (a graph break in a loop?)")
        return result

    def set_budget(self, budget: Budget) -> None:
        """Hold the step to another budget from its next call on. Raises OptionError."""
        resolve_budget(budget)
        self.settings = replace(self.settings, budget=budget)
        self.excess_bytes = self.num_retries = 0
        self._failure = None
        for graph in self.graphs:
            graph.budget_bytes = None
        self.plan_again()

    def plan_again(self) -> None:
        """Every graph is planned afresh when it is next called."""
        self.generation += 1
        self._num_verified = 0

    def resident_bytes(self, program: Program) -> int:
        """Bytes beside `program`: parameters not in it, gradients, optimizer state, what earlier graphs saved,
        and what a measured step took more than was planned."""
        earlier = self._valid_plans
        beside = self.excess_bytes + beside_graph_bytes(self.function, program, first_graph=not earlier)
        return beside + self._gradient_bytes + self._optimizer_bytes + sum(map(_saved_bytes, earlier))

    @property
    def budget_bytes(self) -> int | None:
        """What the measured peak is held to; None: no limit, or nothing captured yet."""
        return max((graph.budget_bytes for graph in self.graphs if graph.budget_bytes is not None), default=None)

    def start_trace(self, args: Sequence[Any]) -> MemoryTrace | None:
        """Start measuring if a plan in force was not verified yet and no measurement is under way."""
        if self._num_verified == len(self._valid_plans) or self.budget_bytes is None:
            return None
        if self._trace is not None and self._trace.is_running:
            return None
        tensors = reachable_tensors((self.function, self.settings.optimizer, args))
        device = device_of(tensors)
        self._start_bytes = sum(storages(tensors, device).values())
        self._trace = MemoryTrace(device, watched=tensors, on_done=self._verify)
        return self._trace if self._trace.begin() else None

    def _verify(self, trace: MemoryTrace) -> None:
        """Compare the measured peak with the budget; after the last retry the next call fails."""
        if trace.peak_delta_bytes is None or self.budget_bytes is None:
            return
        self.measured_peak_bytes = peak_bytes = self._start_bytes + trace.peak_delta_bytes
        self._num_verified = len(self._valid_plans)
        over_bytes = peak_bytes - self.budget_bytes
        if over_bytes <= 0:
            return
        if self.num_retries == NUM_RETRIES or self.settings.plan is not None:
            at_peak = [(row.name, row.nbytes) for row in standing_at_peak(self.plan)[:8]]
            self._failure = BudgetInfeasible(self.budget_bytes, peak_bytes, at_peak, where=", measured")
            _LOGGER.error("%s", self._failure)
            return
        # The prediction was that much too low; where this does not mend it, the compiled code allocates otherwise than
        # the graph, and a plan for a few bytes less may change nothing there: each retry asks for more.
        missing_bytes = max(over_bytes, peak_bytes - self.plan.peak_bytes)
        self.excess_bytes += missing_bytes + int(_MARGIN * self.num_retries * self.budget_bytes)
        self.num_retries += 1
        _LOGGER.info("measured %d bytes over the budget; planned again with %d less", over_bytes, self.excess_bytes)
        self.plan_again()


class Graph:
    """One graph that Dynamo captured: callable, planned and compiled anew whenever the step says so."""

    def __init__(self, step: Step, module: fx.GraphModule) -> None:
        self.step = step
        self.module = module
        self.fake_inputs = compat.fake_inputs(module)  # not Dynamo's examples: those may be the user's own tensors
        self.plan: Plan | None = None
        self.budget_bytes: int | None = None
        self.sizes: Mapping[str, int] = {}
        self.generation = self._planned = step.generation
        self._code: Callable[..., Any] = module

    @property
    def is_stale(self) -> bool:
        """Was everything to be planned again since this graph was?"""
        return self._planned != self.step.generation

    def compile(self, example_inputs: Sequence[Any]) -> None:
        """AOTAutograd, plan, rewrite, lower. Raises BudgetInfeasible, CaptureError, PlanMismatch."""
        key = uuid.uuid4().hex  # plans depend on measured times, so compiled code is never looked up by settings alone
        self._code = backend(self._partition, self.step.settings.inner, key)(self.module, example_inputs)
        self.generation = self.step.generation

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled():
            self.step.check(args)
            if self.generation != self.step.generation:
                self._compile_again()
            if self.plan is not None and self.plan.program.is_symbolic:
                self._check_sizes(args)
            trace = self.step.start_trace(args)
            if trace is not None:
                return self._traced(trace, args)
        return self._code(*args)

    def _traced(self, trace: MemoryTrace, args: Sequence[Any]) -> Any:
        try:
            outputs = self._code(*args)
        except BaseException:
            trace.abandon()
            raise
        trace.end_with_backward_of(outputs)
        return outputs

    def _compile_again(self) -> None:
        with compat.retracing(self.fake_inputs):
            self.compile(self.fake_inputs)

    def _check_sizes(self, args: Sequence[Any]) -> None:
        """Plan again for the sizes of this call if the plan in force would exceed its budget with them."""
        plan, values = self.plan, compat.symbol_values(self.fake_inputs, args)
        if plan is None or plan.budget_bytes is None:
            return
        if plan.peak_bytes_at(values) > plan.budget_bytes:
            self.sizes = values
            self.step.plan_again()
            self._compile_again()

    def _partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        step = self.step
        asked = step.settings.budget
        budget = asked if self.budget_bytes is None or asked == "min" else self.budget_bytes
        self.plan = plan_graph(joint, step.settings, budget, step.resident_bytes, self.sizes)
        self.budget_bytes, self._planned = self.plan.budget_bytes, step.generation
        transfers = open_transfers(self.plan.program, self.plan.actions, step.settings.offload_dir)
        forward, backward = split(rewrite(joint, self.plan.program, self.plan.actions, transfers.key))
        owner = backward if step.settings.inner == "eager" else self  # what lives as long as a backward may come
        weakref.finalize(owner, transfers.close)
        return forward, backward


def compile_step(function: Callable[..., Any], settings: Settings) -> tuple[Step, Callable[..., Any]]:
    """`function` compiled as one step, and the step's state."""
    step = Step(function, settings)
    compiled = compat.isolated_compile(function, step.backend, dynamic=settings.dynamic)
    return step, compiled


def _saved_bytes(plan: Plan) -> int:
    """Bytes that wait between the forward and the backward of a graph, without what is resident anyway."""
    boundary = plan.actions.index(StartBackward())
    nbytes = plan.program.nbytes()
    return sum(nbytes[s] for s, first, last in plan.simulation.lifetimes if first < boundary <= last)
