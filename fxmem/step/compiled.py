"""A compiled training step: learns which graphs a step runs, plans them under one budget, and holds every step to it.

A step is what ran (`episode`): graphs that Dynamo captured are alternatives until they are seen together. The first
step of a kind is planned graph by graph for what stands at that moment, and measured. From then on the kind is known
(`known`): its graphs are planned as one program with what was measured beside them, and looked up, not planned again.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxmem import compat
from fxmem.budget import Budget
from fxmem.capture.ahead import first_break
from fxmem.capture.errors import unwrapped_errors
from fxmem.errors import BudgetInfeasible, CaptureError
from fxmem.options import Settings
from fxmem.planners.plan import Plan, judge
from fxmem.report.decisions import standing_at_peak
from fxmem.report.html import write_html
from fxmem.report.text import line
from fxmem.step.agreement import Agreement
from fxmem.step.call import Call, Key
from fxmem.step.episode import Episode, Measured
from fxmem.step.fission import cheapest_by_turns
from fxmem.step.graph import Graph, storages_of
from fxmem.step.held_tensors import reachable_tensors
from fxmem.step.kinds import Kinds
from fxmem.step.known import Known, StepFissions, backwards, learn
from fxmem.step.limit import Limit
from fxmem.step.living import Living
from fxmem.step.measurement import device_of, paused
from fxmem.step.parallel import parallel_bytes, why_no_graph
from fxmem.step.resident import model_bytes, storage_bytes
from fxmem.step.room import Room
from fxmem.step.sampling import Sampling
from fxmem.step.standing import Standing
from fxmem.step.uncounted import watch
from fxmem.units import format_bytes

NUM_RETRIES = 3
_MARGIN = 0.025  # of the budget, per retry after the first
_SLACK = 0.02  # of the budget: so much left over is worth another plan
_WORTH = 0.01  # of a step: extra time worth another plan
_LOGGER = logging.getLogger("fxmem")
_NUM_RECENT = 16  # kinds of steps that are measured until one measurement of each has held
_owners = itertools.count()


class Step:
    """What the graphs of one compiled callable share: the budget, its verification, the plans. Who calls it holds it.

    `measured_peak_bytes`: of the last step that was measured. `num_retries`: how often a kind of step was planned again
    because a measurement was over the budget.
    """

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.functions = Living([function])
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
        self._whole: Known | None = None
        self._is_told = False
        self._limit = Limit(settings.budget)
        self._arguments: tuple[Any, ...] | None = None
        self._optimizers = [] if settings.optimizer is None else [settings.optimizer]
        self._standing = Standing(self.functions, self._optimizers)
        self._num_calls = itertools.count()
        self.thread = threading.get_ident()
        """Where it was called last, or made."""
        self._num_runs = self.num_finished = 0
        self._leader: Step | None = None
        self.others: Callable[[], list[Callable[..., Any]]] = list
        """Functions that may turn out to be part of this step."""
        self._agreement = Agreement(self._number)
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
            return self._whole.plan_shown
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

    @property
    def is_in_forward(self) -> bool:
        """Is a call of this step, on this thread, waiting for its backward?"""
        episode = self._episode
        return episode is not None and episode.is_here and not episode.backward_order and bool(episode.open_calls)

    @property
    def leader(self) -> Step:
        """The step that this one has become part of; itself if none."""
        return self if self._leader is None else self._leader.leader

    def join(self, function: Callable[..., Any]) -> None:
        """`function`, compiled by itself, is called within this step: its graphs are part of it."""
        self.functions.add([function])
        self._standing.notice_parameters()

    def take(self, other: Step) -> None:
        """`other` is part of this step from now on: what stands for it counts here. Kinds of steps are learned anew."""
        self._settle()
        other._leave_episode()
        other._leader = self
        self.functions.add(other.functions)
        self._optimizers += other._optimizers
        self._carried += other._carried
        self._standing.notice_parameters()
        self._standing.count_optimizers()
        self._kinds = Kinds()
        self._recent.clear()

    def backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """The Dynamo backend of this step."""
        if self._leader is not None:
            return self._leader.backend(module, example_inputs)
        graph = Graph(module, self.settings)
        self._standing.notice_parameters()
        self._room.first(graph, storages_of(example_inputs, self._standing.device), example_inputs)
        self._graphs.add(graph)
        if self._episode is not None:
            self._episode.has_compiled = True

        found = weakref.ref(self)

        def run(*args: Any) -> Any:
            step = found()
            assert step is not None, "whoever calls what was compiled holds its step"
            return step.leader.run(graph, args)

        return run

    def call(
        self,
        function: Callable[..., Any],
        compiled: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """`compiled(*args, **kwargs)`, which torch made of `function`.

        Raises CaptureError if Dynamo gave up and ran it as it is.
        """
        self.thread = threading.get_ident()
        outer, self._arguments = self._arguments, (args, kwargs)  # a model may be called by code of another one
        before = self._num_runs
        try:
            if torch.is_grad_enabled():
                self._open_episode()
            with unwrapped_errors():
                result = compiled(*args, **kwargs)
            if self._num_runs == before and self.settings.budget is not None:
                _refuse_unplanned(function, result, args, kwargs)
            if self._episode is not None and not self._episode.calls:
                self._abandon_episode()  # nothing that ran can be trained
        except BaseException:
            self._abandon_episode()  # the backward that would end it may never come, though its roots live on
            raise
        finally:
            self._arguments = outer
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
        arguments = storages_of(args, self._standing.device) if self._is_held else []
        argument_bytes = sum(dict(arguments).values())
        known = self._expected(episode, key, argument_bytes)
        if self._is_held and not episode.calls and not episode.is_traced:
            is_unsure = known is None or not known.is_verified
            if is_unsure or (self._arguments is None and self.sampling.is_due):
                self._trace(episode, args)
        origins = episode.origins(arguments) if episode.is_traced else ()
        variant = known.variants[len(episode.plans)] if known else self._room.variant(graph, values, arguments)
        is_first = known is None and self._limit.nbytes is not None
        number = next(self._num_calls)
        result = episode.run(Call(number, graph, key, values, variant, origins, argument_bytes, is_first), args)
        self.num_finished += 1
        return result

    @property
    def _is_held(self) -> bool:
        return self.settings.budget is not None or self.settings.plan is not None

    # episodes

    def _open_episode(self) -> Episode:
        """The episode that a forward belongs to: a new one after a backward, or where no forward waits for one."""
        episode = self._episode
        if episode is not None and not episode.backward_order and (episode.open_calls or not episode.calls):
            return episode
        self._leave_episode()
        self._carried = [call for call in self._carried if call.is_open]
        self._episode = Episode(self._number, self._noticed_end)
        is_unsure = not self._recent or not all(known.is_verified for known in self._recent if known.is_alive)
        if self._is_held and self._arguments is not None and (is_unsure or self.sampling.is_due):
            self._trace(self._episode, ())
        self.sampling.begin(self._episode.is_traced)
        return self._episode

    def _leave_episode(self) -> None:
        """No more calls come in the episode that is open, if one is; backwards of its calls may still do."""
        if self._episode is not None:
            self._carried += self._episode.open_calls
            self._episode.end()
        self._settle()

    def _trace(self, episode: Episode, more: Sequence[Any]) -> None:
        """Measure `episode` from here on, in the middle of the user's call only if it makes a graph run that is new."""
        if self._standing.device.type == "cpu" and compat.has_reducer():
            return  # torch's profiler beside DDP's reducer crashes the process, or hangs
        is_whole = not more or self._arguments is None
        is_own = self._standing.is_of_function(more)
        functions = list(self.functions) if is_own else []
        self._limit.grow(self._standing.more_left())
        tensors = reachable_tensors((functions, self._optimizers, self._arguments, more, self._standing.left))
        hidden_bytes = parallel_bytes(*functions)
        episode.start_trace(tensors, device_of(tensors), is_whole, hidden_bytes)
        episode.gradient_bytes = self._standing.existing_gradient_bytes(more)

    def _abandon_episode(self) -> None:
        if self._episode is not None:
            self._episode.abandon()
            self._episode = None

    def _noticed_end(self) -> None:
        """Also called by finalizers: what there is to learn is learned when the next step begins, or someone asks."""
        self.sampling.end()
        self._ended, self._episode = self._episode, None

    def _settle(self) -> None:
        """Learn from the episode that ended last."""
        episode, self._ended = self._ended, None
        if episode is None:
            return
        self._standing.leave(episode.left)
        if not episode.plans:
            return
        if episode.has_compiled and self._is_held and self._standing.left:
            gc.collect()  # Dynamo's notes of a compilation hold what the call returned, until someone collects them
        plans = episode.plans
        self._kinds.drop_dead()
        known = self._kinds.get(episode.prefix) if self._is_held else None
        if episode.measured is not None and self._is_held:
            known = self._learn(episode, self._agreement.on(episode, episode.measured, self.functions))
        elif known is not None and len(known.parts) > 1 and backwards(episode) != known.order:
            known.is_verified = False  # a call that had no backward has one now, say: measure the next such step
        self._last, self._whole = plans, known
        self._learn_undefined(episode)
        if known is not None and known not in self._recent:
            self._recent.append(known)
        if not self._is_told:
            self._is_told = True
            _LOGGER.info("first step: %s", line(self.plan, self._measured_peak_bytes))

    def _learn_undefined(self, episode: Episode) -> None:
        """Large outputs whose gradient no call of a graph was given: its next variants do without."""
        seen: dict[Graph, frozenset[int]] = {}
        for call in episode.calls:
            if call.undefined is not None and self.settings.budget is not None:
                seen[call.graph] = seen.get(call.graph, call.undefined) & call.undefined
        for graph, undefined in seen.items():
            if graph.asked or undefined >= graph.beside_the_loss:
                graph.expect(graph.beside_the_loss)

    def _learn(self, episode: Episode, measured: Measured) -> Known:
        before = self._kinds.like(episode.prefix)
        gradients = self._standing.gradient_bytes - episode.gradient_bytes
        known = learn(episode, measured.levels, gradients + self._standing.missing_optimizer_bytes())
        if before is not None:
            known.num_retries, known.margin_bytes = before.num_retries, before.margin_bytes
            known.is_improved, known.is_least = before.is_improved, before.is_least
            if before.prefix == known.prefix:
                for position, nbytes in enumerate(before.argument_bytes):
                    known.see_arguments(position, nbytes)
            if before in self._recent:
                self._recent.remove(before)
            if before.prefix != known.prefix and before.unplanned_bytes > known.unplanned_bytes:
                before.plan, known = known.plan, before  # of larger sizes: the kind to be ready for
        self._kinds.remember(known)
        self._measured_peak_bytes = measured.peak_bytes
        self._limit.see(known.unplanned_bytes)
        if before is None and self._limit.nbytes is not None:
            watch(self._standing, self._limit.nbytes)
        self._verify(known, episode, measured.peak_bytes)
        return known

    def _see_gradients(self, args: Sequence[Any]) -> None:
        """More gradients stand than in any step before: they count in every plan from now on."""
        more = self._standing.new_gradient_bytes(args)
        if not more:
            return
        self._limit.grow(more)
        for known in self._kinds:
            known.add_bytes(more)
            known.needs_plan |= self._is_over(known)

    # verification

    def _verify(self, known: Known, episode: Episode, peak_bytes: int) -> None:
        """Compare the measured peak with the budget; after the last retry the next such step fails."""
        limit = self._limit_of(known)
        known.plan = replace(known.plan, budget_bytes=limit)
        if limit is None:
            return
        if peak_bytes > limit:
            # What compiling left standing is no part of the steps that follow: the next one is measured, too.
            is_of_compiling = episode.has_compiled and self.settings.inner == "eager"
            if not is_of_compiling or known.plan.peak_bytes > limit:
                self._too_much(known, peak_bytes - limit, limit, peak_bytes)
            return
        if known.plan.peak_bytes > limit:  # it fitted because calls gave back what they saved
            known.needs_plan = True
            return
        known.is_verified = episode.is_whole and not episode.has_compiled
        expected_bytes = max(plan.peak_bytes for v in known.variants if (plan := v.plan) is not None)
        foreseen_bytes = limit if known.may_be_several else expected_bytes
        has_room = foreseen_bytes - known.plan.peak_bytes > _SLACK * limit and self.settings.budget != "min"
        is_tried = known.is_improved or known.is_least
        if has_room and known.plan.extra_s > _WORTH * known.plan.baseline_s and not is_tried:
            known.needs_plan = known.is_improved = True

    def _is_over(self, known: Known) -> bool:
        """Must it be planned again, now that more stands beside it?"""
        limit = self._limit_of(known)
        return limit is None or known.plan.peak_bytes > limit

    def _limit_of(self, known: Known) -> int | None:
        """What a step of this kind is held to."""
        if self.settings.budget == "min" or self.settings.plan is not None:
            budgets = [plan.budget_bytes for v in known.variants if (plan := v.plan) is not None]
            return max((b for b in budgets if b is not None), default=None)
        return self.budget_bytes

    def _too_much(self, known: Known, over_bytes: int, limit: int, peak_bytes: int) -> None:
        if known.num_retries == NUM_RETRIES or self.settings.plan is not None:
            at_peak = [(row.name, row.nbytes) for row in standing_at_peak(known.plan)[:8]]
            known.failure = BudgetInfeasible(limit, peak_bytes, at_peak, where=f", measured{self._beside(known)}")
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

    def _expected(self, episode: Episode, key: Key, argument_bytes: int) -> Known | None:
        """The known kind of step that begins as this one does, planned if need be. Raises BudgetInfeasible."""
        known = self._kinds.find((*episode.prefix, key)) if self._is_held else None
        if known is None:
            return None
        position = len(episode.plans)
        if known.prefix[: position + 1] == (*episode.prefix, key) and known.see_arguments(position, argument_bytes):
            known.needs_plan |= self._is_over(known)
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
            known.fissions, plan = cheapest_by_turns(
                known.asked, known.others, known.whole, solve, budget, len(set(known.forms))
            )
            known.plan = replace(plan, notes={**plan.notes, **known.notes(known.fissions)})
        except BudgetInfeasible as error:
            if known.keep_least():
                self._plan(known)
                return
            known.plan = self._least_of(known, error)
        known.needs_plan = False
        joined = None if known.is_plain else known.joined()
        schedules = [known.plan.actions] if joined is None else joined.split(known.plan.actions)
        before = known.variants
        calls = enumerate(zip(graphs, schedules, before, known.parts, strict=True))
        known.variants = [
            graph.with_plan(known.plan_of(position, actions)) if part.has_backward else variant
            for position, (graph, actions, variant, part) in calls
        ]
        in_use = {id(variant.code) for kind in self._kinds for variant in kind.variants}
        for graph, variant in zip(graphs, before, strict=True):
            if id(variant.code) not in in_use:
                graph.forget(variant)

    def _least_of(self, known: Known, error: BudgetInfeasible) -> Plan:
        """What stood beside the graphs was measured under another plan: the least one may leave less there (what a
        backward retains, say), so it is tried once. Raises `error` the second time."""
        if known.is_least or not error.actions or known.is_plain:
            where = f" for a step of {len(known.parts)} graph calls{self._beside(known)}"
            known.failure = BudgetInfeasible(error.budget_bytes, error.min_bytes, error.at_peak, where, error.actions)
            raise known.failure from error
        known.is_least, known.fissions = True, error.form
        plan = judge(known.whole(error.form), error.actions, known.plan.planner, None, known.plan.machine)
        return replace(plan, budget_bytes=error.budget_bytes)

    def _beside(self, known: Known) -> str:
        """What no plan reaches, for an error's text."""
        kept = storage_bytes(self._standing.left)
        held = f" ({format_bytes(kept)} are what the caller holds of earlier calls' results)" if kept else ""
        return known.unplanned_code + held

    @property
    def _budget(self) -> Budget:
        self._settle()
        return self._limit.budget

    @property
    def _room(self) -> Room:
        """For a call in a step of no known kind."""
        return Room(
            owner=self._number,
            settings=self.settings,
            budget=self._budget,
            standing=self._standing,
            kinds=self._kinds,
            carried=self._carried,
            episode=self._episode,
            user_arguments=self._arguments,
            others_bytes=model_bytes(self.functions, self.others()),
        )


def _refuse_unplanned(
    function: Callable[..., Any], result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises CaptureError if what a call returned was made without any graph, and could be trained."""
    tensors = [t for t in compat.tree_leaves(result) if isinstance(t, torch.Tensor)]
    if not any(t.requires_grad for t in tensors):
        return
    broken = first_break(function, args, kwargs)
    why = why_no_graph(function) or (str(broken) if broken is not None else "a graph break in a loop?")
    raise CaptureError(f"Dynamo found no graph in the step, so it ran without a plan: {why}")
