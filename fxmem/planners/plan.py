"""`Plan`: a frozen schedule of one training graph, with what the simulator says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sympy

from fxmem.budget import Budget, resolve_budget
from fxmem.errors import BudgetInfeasible, PlanMismatch, VerifyError
from fxmem.ir.program import Program
from fxmem.planners import Options, get_planner
from fxmem.planners.plan_file import parse, verify_plan_data, verify_sizes
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.recompute.checkpoints import checkpointed
from fxmem.planners.registry import Solution
from fxmem.planners.smallest import solve
from fxmem.schedule import Action, Machine, SimResult, simulate
from fxmem.schedule.actions import action_from_json, action_to_json
from fxmem.schedule.simulate import Link
from fxmem.units import format_bytes

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from fxmem.capture import JointGraph

FORMAT = "fxmem-plan-1"
STAYS = "stays on the device"
"""Key in `Plan.notes`: storage (as text) -> why it may not be offloaded."""
SPLIT, NOT_SPLIT = "split", "not split"
"""Keys in `Plan.notes`: the regions that run in parts, in words; why others can't."""
ROUNDING = 1e-12  # of the baseline's seconds: sums of the same numbers in another order differ by less


@dataclass(frozen=True)
class Plan:
    """What to keep, recompute and offload in one training step, and what that costs.

    `budget_bytes`: None for no limit. `peak_bytes`, `baseline_peak_bytes`: predicted peak of one forward and backward
    with and without the plan, everything resident included. `baseline_s`: seconds of the ops of the step with no plan;
    `extra_s`: seconds the plan adds (recompute, waiting, splitting); `lower_bound_s`: no plan under this budget adds
    less (of a split program: no plan of this split).
    """

    program: Program
    actions: tuple[Action, ...]
    planner: str
    budget_bytes: int | None
    peak_bytes: int
    baseline_peak_bytes: int
    baseline_s: float
    extra_s: float
    lower_bound_s: float = 0.0
    solve_s: float = 0.0
    machine: Machine = field(default_factory=Machine)
    notes: Mapping[str, Any] = field(default_factory=dict)
    joint: JointGraph | None = field(default=None, compare=False, repr=False)

    @property
    def gap(self) -> float:
        """(extra - lower bound) / baseline: how far from optimal this plan can be at most."""
        return (self.extra_s - self.lower_bound_s) / self.baseline_s if self.baseline_s else 0.0

    @property
    def extra_share(self) -> float:
        """Extra seconds over those of the step with everything saved."""
        return self.extra_s / self.baseline_s if self.baseline_s else 0.0

    @cached_property
    def simulation(self) -> SimResult:
        """Bytes at every action, timeline, lifetimes."""
        return simulate(self.program, self.actions, self.machine)

    def peak_bytes_at(self, values: Mapping[str, int]) -> int:
        """Peak of this schedule at other values of the size symbols."""
        key = tuple(sorted(values.items()))
        if key not in self._peaks:
            self._peaks[key] = simulate(self.program.at(values), self.actions, self.machine).peak_bytes
        return self._peaks[key]

    @cached_property
    def _peaks(self) -> dict[tuple[tuple[str, int], ...], int]:
        return {}

    @cached_property
    def peak_expr(self) -> sympy.Expr:
        """The peak in bytes as an expression of the size symbols (a constant when shapes are static)."""
        from fxmem.analysis.peak import peak_expr

        return peak_expr(self.program, self.actions)

    @cached_property
    def graph_module(self) -> GraphModule:
        """The rewritten joint GraphModule: node order is the schedule. Raises PlanMismatch without a captured graph."""
        from fxmem.passes import apply_plan

        if self.joint is None:
            raise PlanMismatch("this plan was loaded from a file: apply it with fxmem.compile(model, plan=plan)")
        return apply_plan(self.joint, self)

    def for_graph(self, joint: JointGraph, program: Program) -> Plan:
        """This plan for a captured graph, with the figures of `program`.

        Raises PlanMismatch when the schedule isn't one of that graph.
        """
        if program.fingerprint != self.program.fingerprint:
            raise PlanMismatch(
                f"the plan was made for {self.program.name} [{self.program.fingerprint}], {len(self.program.ops)} ops; "
                f"this graph is {program.name} [{program.fingerprint}], {len(program.ops)} ops"
            )
        plan = judge(program, self.actions, self.planner, None, self.machine)
        return replace(plan, budget_bytes=self.budget_bytes, notes=self.notes, joint=joint)

    def __repr__(self) -> str:
        """One line; `str` has the tables."""
        budget = "" if self.budget_bytes is None else f" under {format_bytes(self.budget_bytes)}"
        peaks = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.baseline_peak_bytes)}"
        graph = f"{self.program.name} [{self.program.fingerprint}]"
        return f"<Plan of {graph} by {self.planner}{budget}: {peaks}, {self.extra_share:+.1%} time>"

    def __str__(self) -> str:
        from fxmem.report.text import summary

        return summary(self)

    def diff(self, other: Plan) -> str:
        """What `other` does otherwise, in words: figures, and values that are kept, recomputed or offloaded anew."""
        from fxmem.report.diff import difference

        return difference(self, other)

    def __deepcopy__(self, memo: Any) -> Plan:
        return self  # it never changes, and the graph it may hold is not to be copied

    def __getstate__(self) -> dict[str, Any]:
        """Pickled as saved to a file: without the graph."""
        return {f.name: getattr(self, f.name) if f.name != "joint" else None for f in fields(self)}

    def report(self, path: str | Path, beside: Sequence[Plan] = ()) -> None:
        """Write an HTML report: timeline, saved tensors, what was decided and why.

        `beside`: plans of the same step to compare with, such as `torch_plans()`; each is drawn at its peak.
        """
        from fxmem.report.html import write_html

        write_html(self, Path(path), beside)

    def torch_plans(self, settings: Sequence[float] | None = None) -> list[Plan]:
        """What torch's own `activation_memory_budget` makes of the same graph at `settings` from 0 to 1 (default:
        eleven), predicted, about a second each. Raises PlanMismatch for a plan that was loaded or is split.
        """
        from fxmem.report.torch_knob import SWEEP, torch_plans

        return torch_plans(self, SWEEP if settings is None else settings)

    def trace(self, path: str | Path) -> None:
        """Write a Chrome trace for Perfetto: the simulated streams, ops within their modules, bytes by kind."""
        from fxmem.report.trace import write_trace

        write_trace(self, Path(path))

    def memory_snapshot(self, path: str | Path, measured: Sequence[tuple[int, int]] = ()) -> None:
        """Write a memory snapshot as PyTorch's own are, for pytorch.org/memory_viz: what the plan foretells.

        `measured`: events of a measurement, shown as a second device: `fxmem.measure(fn, events=True).events`.
        """
        from fxmem.report.snapshot import write_snapshot

        write_snapshot(self, Path(path), measured)

    def _repr_html_(self) -> str:
        """For notebooks: the figures, memory before and after, saved tensors by module."""
        from fxmem.report.html import notebook

        return notebook(self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON (schedule, program and figures; not the graph itself)."""
        Path(path).write_text(json.dumps(self.to_json()), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Inverse of `save`; figures are simulated afresh. Raises PlanMismatch when the file isn't a plan."""
        try:
            return cls.from_json(parse(Path(path).read_text(encoding="utf-8")))
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError, VerifyError) as error:
            raise PlanMismatch(f"{path} does not hold a valid plan: {error or type(error).__name__}") from error

    def to_json(self) -> dict[str, Any]:
        links = {
            tier: [link.out_bytes_per_s, link.in_bytes_per_s, link.latency_s]
            for tier, link in self.machine.links.items()
        }
        return {
            "format": FORMAT,
            "planner": self.planner,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "baseline_peak_bytes": self.baseline_peak_bytes,
            "baseline_s": self.baseline_s,
            "extra_s": self.extra_s,
            "lower_bound_s": self.lower_bound_s,
            "solve_s": self.solve_s,
            "notes": dict(self.notes),
            "links": links,
            "actions": [action_to_json(action) for action in self.actions],
            "program": self.program.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`. Raises ValueError, VerifyError when it is not a plan."""
        found = data.get("format") if isinstance(data, Mapping) else None
        if found != FORMAT:
            raise ValueError(f"format {str(found)[:60]!r}, expected {FORMAT!r}")
        verify_plan_data(data)
        program = Program.from_json(data["program"])
        verify_sizes(program.nbytes())
        plan = judge(
            program,
            tuple(action_from_json(row) for row in data["actions"]),
            planner=data["planner"],
            budget_bytes=data["budget_bytes"],
            machine=Machine({tier: Link(*values) for tier, values in data["links"].items()}),
        )
        return replace(plan, lower_bound_s=data["lower_bound_s"], solve_s=data["solve_s"], notes=data["notes"])


def judge(
    program: Program,
    actions: tuple[Action, ...],
    planner: str,
    budget_bytes: int | None,
    machine: Machine,
) -> Plan:
    """A Plan with the simulator's figures. Raises VerifyError when the actions are invalid or over the budget."""
    result = simulate(program, actions, machine)
    if budget_bytes is not None and result.peak_bytes > budget_bytes:
        raise VerifyError(f"planner {planner} promised {budget_bytes} bytes, its schedule peaks at {result.peak_bytes}")
    for tier, nbytes in result.tier_peak_bytes.items():
        if nbytes > machine.capacity_bytes.get(tier, nbytes):
            raise VerifyError(
                f"the schedule of planner {planner} takes {nbytes} bytes of the {tier} tier, more than it has"
            )
    baseline = unplanned(program)
    return Plan(
        program=program,
        actions=actions,
        planner=planner,
        budget_bytes=budget_bytes,
        peak_bytes=result.peak_bytes,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_s=baseline.seconds,
        extra_s=result.seconds - baseline.seconds,
        machine=machine,
    )


def unplanned(program: Program) -> SimResult:
    """The run of the program as it was captured, unsplit, with everything saved."""
    reference = program.reference
    return simulate(reference, baseline_actions(reduce_program(reference)))


def baseline_actions(problem: Problem) -> tuple[Action, ...]:
    """The captured order with everything saved."""
    return problem.actions(range(problem.num_kernels), problem.num_forward)


def make_plan(program: Program, budget: Budget, planner: str = "auto", options: Options | None = None) -> Plan:
    """Plan `program` under `budget` with the planner of that name.

    A model's checkpoints (torch's, `fxmem.recompute`) are the plan without a budget, and no plan peaks higher than they
    do. Raises OptionError (malformed budget, unknown planner) and BudgetInfeasible.
    """
    options = options or Options()
    limit = resolve_budget(budget)
    get_planner(planner)  # an unknown name is an error without a budget, too
    problem = reduce_program(program)
    started = time.perf_counter()
    wish = checkpointed(problem)
    if limit is None:
        found = wish or Solution(baseline_actions(problem), notes={"why": "no budget"})
        return replace(judge(program, found.actions, "none", None, options.machine), notes=found.notes)
    if limit == "min":
        limit, start = _smallest_budget(problem, planner, options)
        if start and options.start is None:
            options = replace(options, start=start, start_share=1.0)
    elif isinstance(limit, float):
        limit = int(limit * unplanned(program).peak_bytes)
    try:
        found = _solve(planner, problem, limit, options, wish)
    except BudgetInfeasible as error:
        raise error.of(budget, program.shown) from None
    solve_s = time.perf_counter() - started
    plan = judge(program, found.actions, planner, limit, options.machine)
    bound_s = found.lower_bound_s + problem.baseline_s - plan.baseline_s if program.unsplit else found.lower_bound_s
    lower_bound_s = max(min(0.0, plan.extra_s), bound_s - ROUNDING * plan.baseline_s)
    return replace(plan, lower_bound_s=lower_bound_s, notes=found.notes, solve_s=solve_s)


def _solve(planner: str, problem: Problem, limit: int, options: Options, wish: Solution | None) -> Solution:
    """The planner's answer, under what the model's checkpoints need if that is less: theirs if it finds none there."""
    if wish is None:
        return solve(planner, problem, limit, options)
    need_bytes = simulate(problem.program, wish.actions, options.machine).peak_bytes
    try:
        return solve(planner, problem, min(limit, need_bytes), options)
    except BudgetInfeasible:
        if need_bytes > limit:
            raise
        return wish


def _smallest_budget(problem: Problem, planner: str, options: Options) -> tuple[int, tuple[Action, ...]]:
    """Bytes, and the schedule that needs so many, if the planner told."""
    try:
        solve(planner, problem, problem.base_bytes, options)
    except BudgetInfeasible as error:
        return error.min_bytes, error.actions
    return problem.base_bytes, ()
