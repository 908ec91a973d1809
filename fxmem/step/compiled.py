"""A compiled training step: learns which graphs a step runs, plans them under one budget, and holds every step to it.

A step is what ran (`episode`): graphs that Dynamo captured are alternatives until they are seen together. The first
step of a kind is planned graph by graph for what stands at that moment, and measured. From then on the kind is known
(`known`): its graphs are planned as one program with what was measured beside them, and looked up, not planned again.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxmem import compat
from fxmem.budget import Budget, resolve_budget
from fxmem.capture.ahead import first_break
from fxmem.capture.errors import unwrapped_errors
from fxmem.capture.traced import Traced
from fxmem.errors import BudgetInfeasible, CaptureError, PlanMismatch
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.planners.plan import Plan, judge
from fxmem.report.decisions import standing_at_peak
from fxmem.report.html import write_html
from fxmem.report.text import line
from fxmem.schedule import Machine, simulate
from fxmem.step.episode import Call, Episode, Key, Level
from fxmem.step.fission import cheapest
from fxmem.step.graph import Graph, Variant, code_beside, storages_of
from fxmem.step.held_tensors import reachable_tensors
from fxmem.step.joined import Segment
from fxmem.step.kinds import Kinds
from fxmem.step.known import Known, StepFissions, learn, unplanned_bytes
from fxmem.step.limit import Limit
from fxmem.step.measurement import device_of, paused
from fxmem.step.parallel import parallel_bytes, why_no_graph
from fxmem.step.sampling import Sampling
from fxmem.step.standing import Standing

NUM_RETRIES = 3
_MARGIN = 0.025  # of the budget, per retry after the first
_SLACK = 0.02  # of the budget: so much left over is worth another plan
_WORTH = 0.01  # of a step: extra time worth another plan
_LOSS = 2  # times the gradients of the outputs: what a loss outside of the model is taken to hold, until it was seen
_SMALLEST = "made for the smallest budget"
_SMALL_BYTES = 4096  # a loss is a number: nothing follows it
_LOGGER = logging.getLogger("fxmem")
_NUM_RECENT = 16  # kinds of steps that are measured until one measurement of each has held
_owners = itertools.count()


class Step:
    """What the graphs of one compiled callable share: the budget, its verification, the plans.

    `measured_peak_bytes`: of the last step that was measured. `num_retries`: how often a kind of step was planned again
    because a measurement was over the budget.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        self._num_retries = 0
        self._measured_peak_bytes: int | None = None
        self._number = next(_owners)
        self._recent: deque[Known] = deque(maxlen=_NUM_RECENT)
        self._carried: list[Call] = []
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._kinds = Kinds()
        self._episode: Episode | None = None
        self._ended: Episode | None = None
        self._last: list[Plan] = []
        self._whole: Plan | None = None
        self._is_told = False
        self._limit = Limit(settings.budget)
        self._arguments: tuple[Any, ...] | None = None
        self._standing = Standing(function, settings.optimizer)
        self._num_calls = itertools.count()
        self._num_runs = self._num_finished = 0
        self._with_numbers: Callable[..., Any] | None = None
        self.sampling = Sampling()

    # what a user reads

    @property
    def plans(self) -> list[Plan]:
        """One for each call of a training graph in the step that runs, or ran last."""
        self._settle()
        running = self._episode.plans if self._episode is not None else []
        return running or list(self._last)

    @property
    def plan(self) -> Plan:
        """The plan of the step that ran last, all its graphs together. Raises LookupError before the first one."""
        plans = self.plans
        if self._whole is not None and plans == self._last:
            return self._whole
        if not plans:
            raise LookupError("nothing is planned before the first training step; fxmem.plan does it ahead of time")
        return max(plans, key=lambda plan: plan.peak_bytes)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the function's modules when a graph was captured last: adapters that are put on later are, too."""
        return self._standing.parameters

    @property
    def num_retries(self) -> int:
        self._settle()
        return self._num_retries

    @property
    def measured_peak_bytes(self) -> int | None:
        self._settle()
        return self._measured_peak_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What measured peaks are held to; None: no limit, or a fraction of a step that was not seen yet."""
        self._settle()
        return self._limit.nbytes

    def set_budget(self, budget: Budget) -> None:
        """Hold the step to another budget from its next call on. Raises OptionError."""
        limit = Limit(budget)
        self._settle()
        self.settings = replace(self.settings, budget=budget)
        self._num_retries = 0
        self._limit = limit
        kinds = list(self._kinds)
        for known in kinds:
            known.margin_bytes = known.num_retries = 0
            known.failure, known.needs_plan = None, True
            known.is_improved = known.is_verified = known.is_least = False
        if kinds:
            limit.see(max(known.unplanned_bytes for known in kinds))

    def report(self, path: str | Path) -> None:
        """Write one HTML page with the plans of all kinds of steps seen so far. Raises LookupError before the first."""
        self._settle()
        plans = {id(kind.plan): kind.plan for kind in self._kinds}
        write_html(list(plans.values()) or [self.plan], Path(path))

    # running

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend of this step."""
        graph = Graph(module, self.settings)
        self._standing.notice_parameters()
        arguments = storages_of(example_inputs, self._standing.device)
        graph.compile(lambda made: self._first_plan(made, {}, arguments), example_inputs)
        self._graphs.add(graph)
        if self._episode is not None:
            self._episode.has_compiled = True

        def run(*args: Any) -> Any:
            return self.run(graph, args)

        return run

    def call(self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`compiled(*args, **kwargs)`. Raises CaptureError if Dynamo gave up and ran the model as it is.

        A graph that can't do without splitting is captured anew with numbers for sizes where Dynamo had made symbols
        of those that were seen to change: from then on every size has a graph of its own.
        """
        before = self._num_finished
        try:
            return self._call(self._with_numbers or compiled, args, kwargs)
        except BudgetInfeasible as error:
            can_change = error.is_unsplit and self.settings.dynamic is None and self.settings.capture == "dynamo"
            if not can_change or self._with_numbers is not None or self._num_finished != before:
                raise
        _LOGGER.info("the step has to be split to fit: from now on it is compiled for each size of its inputs")
        self._with_numbers = compat.isolated_compile(self.function, self.backend, dynamic=False)
        return self._call(self._with_numbers, args, kwargs)

    def _call(self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._arguments, before = (args, kwargs), self._num_runs
        try:
            if torch.is_grad_enabled():
                self._open_episode()
            with unwrapped_errors():
                result = compiled(*args, **kwargs)
            if self._num_runs == before and self.settings.budget is not None:
                self._refuse_unplanned(result, args, kwargs)
        except BaseException:
            if self._episode is not None:
                self._episode.abandon()  # the backward that would end it may never come, though its roots live on
                self._episode = None
            raise
        finally:
            self._arguments = None
        return result

    def run(self, graph: Graph, args: Sequence[Any]) -> Any:
        """One call of `graph`: what a known step planned for it here, or what suits what stands now."""
        self._num_runs += 1
        if not torch.is_grad_enabled() or not graph.has_backward:
            return graph.variants[0].code(*args)
        self._see_gradients(args)
        episode = self._open_episode()
        values = graph.values(args)
        key: Key = (graph.number, *sorted(values.items()))
        known = self._expected(episode, key)
        if self._is_held and not episode.calls and not episode.is_traced:
            is_unsure = known is None or not known.is_verified
            if is_unsure or (self._arguments is None and self.sampling.is_due):
                self._trace(episode, args)
        arguments = storages_of(args, self._standing.device) if self._is_held else []
        origins = episode.origins(arguments) if episode.is_traced else ()
        variant = known.variants[len(episode.plans)] if known else self._suitable(graph, values, arguments)
        result = episode.run(Call(next(self._num_calls), graph, key, values, variant, origins), args)
        self._num_finished += 1
        return result

    def _refuse_unplanned(self, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises CaptureError if what a call returned was made without any graph, and could be trained."""
        tensors = [t for t in compat.tree_leaves(result) if isinstance(t, torch.Tensor)]
        if not any(t.requires_grad for t in tensors):
            return
        broken = first_break(self.function, args, kwargs)
        why = why_no_graph(self.function) or (str(broken) if broken is not None else "a graph break in a loop?")
        raise CaptureError(f"Dynamo found no graph in the step, so it ran without a plan: {why}")

    @property
    def _is_held(self) -> bool:
        return self.settings.budget is not None or self.settings.plan is not None

    # episodes

    def _open_episode(self) -> Episode:
        """The episode that a forward belongs to: a new one after a backward, or where no forward waits for one."""
        episode = self._episode
        if episode is not None and not episode.backward_order and (episode.open_calls or not episode.calls):
            return episode
        if episode is not None:
            self._carried += episode.open_calls
            episode.end()
        self._settle()
        self._carried = [call for call in self._carried if call.is_open]
        self._episode = Episode(self._number, self._noticed_end)
        is_unsure = not self._recent or not all(known.is_verified for known in self._recent if known.is_alive)
        if self._is_held and self._arguments is not None and (is_unsure or self.sampling.is_due):
            self._trace(self._episode, ())
        self.sampling.begin(self._episode.is_traced)
        return self._episode

    def _trace(self, episode: Episode, more: Sequence[Any]) -> None:
        """Measure `episode` from here on, in the middle of the user's call only if it makes a graph run that is new."""
        is_whole = not more or self._arguments is None
        is_own = self._standing.is_of_function(more)
        function = self.function if is_own else None
        tensors = reachable_tensors((function, self.settings.optimizer, self._arguments, more))
        hidden_bytes = parallel_bytes(self.function) if is_own else 0
        episode.start_trace(tensors, device_of(tensors), is_whole, hidden_bytes)
        episode.gradient_bytes = self._standing.existing_gradient_bytes(more)

    def _noticed_end(self) -> None:
        """Also called by finalizers: what there is to learn is learned when the next step begins, or someone asks."""
        self.sampling.end()
        self._ended, self._episode = self._episode, None

    def _settle(self) -> None:
        """Learn from the episode that ended last."""
        episode, self._ended = self._ended, None
        if episode is None or not episode.plans:
            return
        plans = episode.plans
        self._kinds.drop_dead()
        known = self._kinds.get(episode.prefix) if self._is_held else None
        levels = episode.levels
        if levels is not None and self._is_held:
            known = self._learn(episode, levels)
        self._last, self._whole = plans, known.plan if known is not None else None
        if known is not None and known not in self._recent:
            self._recent.append(known)
        if not self._is_told:
            self._is_told = True
            _LOGGER.info("first step: %s", line(self.plan, self._measured_peak_bytes))

    def _learn(self, episode: Episode, levels: Mapping[Segment, Level]) -> Known:
        before = self._kinds.like(episode.prefix)
        gradients = self._standing.gradient_bytes - episode.gradient_bytes
        known = learn(episode, levels, gradients + self._standing.missing_optimizer_bytes())
        if before is not None:
            known.num_retries, known.margin_bytes = before.num_retries, before.margin_bytes
            known.is_improved, known.is_least = before.is_improved, before.is_least
            if before in self._recent:
                self._recent.remove(before)
            if before.prefix != known.prefix and before.unplanned_bytes > known.unplanned_bytes:
                before.plan, known = known.plan, before  # of larger sizes: the kind to be ready for
        self._kinds.remember(known)
        self._measured_peak_bytes = episode.peak_bytes
        self._limit.see(known.unplanned_bytes)
        self._verify(known, episode)
        return known

    def _see_gradients(self, args: Sequence[Any]) -> None:
        """More gradients stand than in any step before: they count in every plan from now on."""
        more = self._standing.new_gradient_bytes(args)
        if not more:
            return
        self._limit.grow(more)
        for known in self._kinds:
            known.add_bytes(more)
            limit_bytes = self._limit_of(known)
            known.needs_plan |= limit_bytes is None or known.plan.peak_bytes > limit_bytes

    # verification

    def _verify(self, known: Known, episode: Episode) -> None:
        """Compare the measured peak with the budget; after the last retry the next such step fails."""
        peak_bytes, limit = episode.peak_bytes, self._limit_of(known)
        known.plan = replace(known.plan, budget_bytes=limit)
        if limit is None or peak_bytes is None:
            return
        if peak_bytes > limit:
            self._too_much(known, peak_bytes - limit, limit, peak_bytes)
            return
        known.is_verified = episode.is_whole and not episode.has_compiled
        expected_bytes = max(plan.peak_bytes for v in known.variants if (plan := v.plan) is not None)
        foreseen_bytes = limit if known.may_be_several else expected_bytes
        has_room = foreseen_bytes - known.plan.peak_bytes > _SLACK * limit and self.settings.budget != "min"
        is_tried = known.is_improved or known.is_least
        if has_room and known.plan.extra_s > _WORTH * known.plan.baseline_s and not is_tried:
            known.needs_plan = known.is_improved = True

    def _limit_of(self, known: Known) -> int | None:
        """What a step of this kind is held to."""
        if self.settings.budget == "min" or self.settings.plan is not None:
            budgets = [plan.budget_bytes for v in known.variants if (plan := v.plan) is not None]
            return max((b for b in budgets if b is not None), default=None)
        return self.budget_bytes

    def _too_much(self, known: Known, over_bytes: int, limit: int, peak_bytes: int) -> None:
        if known.num_retries == NUM_RETRIES or self.settings.plan is not None:
            at_peak = [(row.name, row.nbytes) for row in standing_at_peak(known.plan)[:8]]
            known.failure = BudgetInfeasible(limit, peak_bytes, at_peak, where=f", measured{known.unplanned_code}")
            _LOGGER.error("%s", known.failure)
            return
        # What was measured beside the graphs is in the next plan. Where that does not mend it, the compiled code
        # allocates otherwise than the graph, and a plan for a few bytes less may change nothing: ask for more.
        if known.num_retries:
            known.margin_bytes += over_bytes + int(_MARGIN * known.num_retries * limit)
            if self.settings.inner == "inductor" and any(known.fissions):
                known.refuse_parts()
        known.num_retries += 1
        self._num_retries += 1
        known.needs_plan = True
        _LOGGER.info("a step was measured %d bytes over its budget of %d; the next is planned anew", over_bytes, limit)

    # choosing

    def _expected(self, episode: Episode, key: Key) -> Known | None:
        """The known kind of step that begins as this one does, planned if need be. Raises BudgetInfeasible."""
        known = self._kinds.find((*episode.prefix, key)) if self._is_held else None
        if known is None:
            return None
        if not episode.calls:
            if known.failure is not None:
                raise known.failure
            if known.needs_plan and self.settings.plan is None:
                episode.has_compiled = True
                with paused():
                    self._plan(known)
        return known

    def _plan(self, known: Known) -> None:
        """Plan all calls of a kind of step together. Raises BudgetInfeasible."""
        graphs = [graph for ref in known.graphs if (graph := ref()) is not None]
        budget = self._budget

        def solve(fissions: StepFissions, share: float) -> Plan:
            return known.planned(fissions, self.settings, budget, share)

        try:
            known.fissions, plan = cheapest(known.asked, known.others, known.whole, solve, budget)
            known.plan = replace(plan, notes={**plan.notes, **known.notes(known.fissions)})
        except BudgetInfeasible as error:
            known.plan = self._least_of(known, error)
        known.needs_plan = False
        joined = None if known.is_plain else known.joined()
        schedules = [known.plan.actions] if joined is None else joined.split(known.plan.actions)
        plans = [known.plan_of(position, actions) for position, actions in enumerate(schedules)]
        before = known.variants
        known.variants = [graph.with_plan(plan) for graph, plan in zip(graphs, plans, strict=True)]
        in_use = {id(variant.code) for kind in self._kinds for variant in kind.variants}
        for graph, variant in zip(graphs, before, strict=True):
            if id(variant.code) not in in_use:
                graph.forget(variant)

    def _least_of(self, known: Known, error: BudgetInfeasible) -> Plan:
        """What stood beside the graphs was measured under another plan: the least one may leave less there (what a
        backward retains, say), so it is tried once. Raises `error` the second time."""
        if known.is_least or not error.actions or known.is_plain:
            where = f" for a step of {len(known.parts)} graph calls{known.unplanned_code}"
            known.failure = BudgetInfeasible(error.budget_bytes, error.min_bytes, error.at_peak, where, error.actions)
            raise known.failure from error
        known.is_least, known.fissions = True, error.form
        plan = judge(known.whole(error.form), error.actions, known.plan.planner, None, known.plan.machine)
        return replace(plan, budget_bytes=error.budget_bytes)

    @property
    def _budget(self) -> Budget:
        self._settle()
        return self._limit.budget

    def _suitable(self, graph: Graph, values: Mapping[str, int], arguments: Sequence[tuple[int, int]]) -> Variant:
        """For a call in a step of no known kind: the fastest variant that fits beside what stands, or a new one."""
        limit = self._budget
        program = graph.captured.program.at(values)
        if self.settings.plan is None and limit is not None:
            beside = self._beside_bytes(graph, program, arguments) + self._guess_bytes(graph, program)
            program = replace(program, extra_resident_bytes=beside)
        for variant in sorted(graph.variants, key=lambda v: v.plan.extra_s if v.plan else 0.0):
            plan = variant.plan
            if plan is None or variant.rereads & graph.pinned:
                continue
            if self._suits(plan, graph.forms.program(plan.program.fissions, program), limit):
                return variant
        if self._episode is not None:
            self._episode.has_compiled = True
        return graph.compile(lambda made: self._first_plan(made, values, arguments))

    def _suits(self, plan: Plan, program: Program, limit: Budget) -> bool:
        """Is `program`, a graph with what stands beside it now, within `limit` under `plan`?"""
        if self.settings.plan is not None:
            return True
        if limit is None:
            return plan.budget_bytes is None or plan.extra_s == 0
        if limit == "min":
            return plan.notes.get(_SMALLEST, False) and plan.program.hints == program.hints
        asked = resolve_budget(limit)
        assert isinstance(asked, (int, float))
        limit_bytes = int(asked * unplanned_bytes(program)) if isinstance(asked, float) else asked
        return simulate(program, plan.actions, plan.machine).peak_bytes <= limit_bytes

    def _first_plan(self, graph: Graph, values: Mapping[str, int], arguments: Sequence[tuple[int, int]]) -> Plan:
        """A plan for a graph in a step of no known kind: for what stands now, and a guess at what may follow."""
        program = graph.captured.program.at(values)
        if self.settings.plan is not None:
            form = graph.forms.form(self.settings.plan.program.fissions)
            plan = self.settings.plan.for_graph(form.joint, form.program.at(values))
            forbidden = graph.rereads(plan) & graph.pinned
            if forbidden:
                names = " and ".join(map(graph.input_name, forbidden))
                raise PlanMismatch(f"the plan computes again from {names}, overwritten between forward and backward")
            return plan
        limit = self._budget
        if limit is None:
            return graph.forms.plan(program, None)
        beside = self._beside_bytes(graph, program, arguments)
        if graph.may_be_followed:
            limit = "min"  # more graphs follow, and nobody knows yet what they need
        guess = 0 if limit == "min" else self._guess_bytes(graph, program)
        for more in dict.fromkeys((guess, 0)):
            program = replace(program, extra_resident_bytes=beside + more)
            try:
                plan = graph.forms.plan(program, limit)
            except BudgetInfeasible as error:
                refusal = error
            else:
                return replace(plan, notes={**plan.notes, _SMALLEST: True}) if limit == "min" else plan
        return self._least(graph, program, refusal)

    def _least(self, graph: Graph, program: Program, error: BudgetInfeasible) -> Plan:
        """Beside calls in flight that were planned without knowing of this one: the least that it can do with.

        The step is over its budget, once: then it is known. Raises `error` where nothing else is in flight.
        """
        if not error.actions or self._episode is None or not self._episode.open_calls:
            beside = "".join(f" (not planned: {code})" for code in code_beside([graph]))
            raise error.of(error.asked, error.graph, beside) from error
        _LOGGER.warning(
            "this step calls more graphs before its backward than any before: it may exceed its budget, this once; "
            "where that can't be, take a first step on a small batch"
        )
        form = error.form or ()
        split = graph.forms.program(form, program)
        plan = judge(split, error.actions, self.settings.planner, None, Machine())
        return replace(plan, budget_bytes=error.budget_bytes, joint=graph.forms.form(form).joint)

    def _guess_bytes(self, graph: Graph, program: Program) -> int:
        """What comes on top of a graph alone: as in a known step of it, or a loss outside of the model."""
        for known in self._kinds:
            if known.prefix[0][0] == graph.number and len(known.parts) == 1:
                return known.beside_at(program)
        tangents = {s for op in program.ops if op.is_input and op.region == "backward" for s in op.storages}
        nbytes = program.nbytes()
        return _LOSS * sum(nbytes[s] for s in tangents if nbytes[s] > _SMALL_BYTES)

    def _beside_bytes(self, graph: Graph, program: Program, arguments: Sequence[tuple[int, int]]) -> int:
        """Bytes that stand beside `program` as it runs now."""
        in_use = {address for address, _ in arguments}
        is_first = graph.may_be_followed
        return self._standing.beside_bytes(program, is_first, in_use, self._arguments, self._carried, self._episode)


def compile_step(function: Callable[..., Any], settings: Settings) -> tuple[Step, Callable[..., Any]]:
    """`function` compiled as one step, and the step's state."""
    step = Step(function, settings)
    if settings.capture == "trace":
        return step, Traced(function, step.backend)
    return step, compat.isolated_compile(function, step.backend, dynamic=settings.dynamic)
