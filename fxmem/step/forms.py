"""The forms of a captured graph: as it was captured, and split along regions."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fxmem import compat
from fxmem.budget import Budget
from fxmem.capture import JointGraph
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Fission, Op, Program
from fxmem.options import Settings
from fxmem.planners.plan import NOT_SPLIT, SPLIT, Plan
from fxmem.schedule import Action
from fxmem.step.candidates import Candidates, described, split_graph
from fxmem.step.fission import cheapest
from fxmem.step.graph_plan import annotated_program, plan_form

Fissions = tuple[Fission, ...]
_MOST_COMPILED = 2000
"""So many ops inductor compiles in minutes."""


@dataclass(frozen=True)
class Form:
    """A graph in one form, and its program with costs."""

    joint: JointGraph
    program: Program


class Forms:
    """Made when they are asked for. `may_run`: single ops may be measured."""

    def __init__(self, joint: JointGraph, settings: Settings, may_run: bool) -> None:
        self.settings, self.may_run = settings, may_run
        self._made: dict[Fissions, Form] = {(): Form(joint, annotated_program(joint, settings, may_run))}
        self._pinned: frozenset[int] = frozenset()
        self._fault: str | None = None
        self._starts: dict[Fissions, tuple[Action, ...]] = {}

    @property
    def unsplit(self) -> Form:
        return self._made[()]

    def see(self, joint: JointGraph) -> None:
        """The same graph was captured again."""
        self._made[()] = replace(self.unsplit, joint=joint)

    def pin(self, storages: Set[int]) -> None:
        """No op that reads one of these inputs may run again: the caller overwrites them before backward."""
        self._pinned |= storages
        self._starts.clear()
        for fissions, form in self._made.items():
            self._made[fissions] = replace(form, program=read_once(form.program, self._pinned))

    def form(self, fissions: Fissions) -> Form:
        """The graph split so. Raises VerifyError where it can't be."""
        if fissions not in self._made:
            joint = split_graph(self.unsplit.joint, fissions)
            program = annotated_program(joint, self.settings, self.may_run and not compat.profiler_is_taken())
            program = replace(program, fissions=fissions, unsplit=self.unsplit.program)
            self._made[fissions] = Form(joint, read_once(program, self._pinned))
        return self._made[fissions]

    def program(self, fissions: Fissions, like: Program) -> Program:
        """The program of a form at the sizes of `like`, where that stands."""
        return self.form(fissions).program.at(like.hints).standing_as(like)

    @property
    def asked(self) -> Fissions:
        """How the user wants the graph to be split."""
        return () if isinstance(self.settings.fission, str) else tuple(self.settings.fission)

    @property
    def others(self) -> list[Fissions]:
        """How else it may be split: under inductor, which compiles each part alone, a large graph not as a whole."""
        found = self._candidates.fissions if self._is_open else []
        return [f for f in found if self.settings.inner == "eager" or all(map(self._is_short, f))]

    @property
    def _is_open(self) -> bool:
        return may_split(self.settings) and self._fault is None

    def _is_short(self, fission: Fission) -> bool:
        return bool(fission.min_bytes) or fission.num_parts * len(self.unsplit.program.ops) <= _MOST_COMPILED

    def refuse_parts(self) -> None:
        """Compiled, split forms were measured to need more than they should: no more are tried."""
        self._fault = "compiled by inductor, parts were measured to need more than they should one by one"

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates(self.unsplit.joint, self.unsplit.program)

    def notes(self, fissions: Fissions) -> dict[str, Any]:
        """For a report: what is split, or why nothing could be, once that was looked at."""
        if fissions:
            return {SPLIT: described(self.unsplit.joint, fissions)}
        refusals = list(self._candidates.refusals) if "_candidates" in vars(self) else []
        refusals += [self._fault] if self._fault is not None else []
        return {NOT_SPLIT: refusals} if refusals else {}

    def plan(self, program: Program, budget: Budget) -> Plan:
        """Plan the graph, `program` being the unsplit one with what stands beside it, from the plan before this one.

        Raises BudgetInfeasible.
        """

        def program_of(fissions: Fissions) -> Program:
            return self.program(fissions, program)

        def solve(fissions: Fissions, share: float) -> Plan:
            start = self._starts.get(fissions)
            plan = plan_form(program_of(fissions), self.form(fissions).joint, self.settings, budget, share, start)
            self._starts[fissions] = plan.actions
            return plan

        try:
            fissions, plan = cheapest(self.asked, lambda: self.others, program_of, solve, budget)
        except BudgetInfeasible as error:
            error.is_unsplit = self._is_open and program.is_symbolic
            raise
        return replace(plan, notes={**plan.notes, **self.notes(fissions)})


def may_split(settings: Settings) -> bool:
    """May a planner choose to split?"""
    return settings.fission == "auto" and settings.planner == "auto"


def plan_graph(
    joint: JointGraph, settings: Settings, budget: Budget, resident_bytes: Callable[[Program], int], may_run: bool
) -> Plan:
    """Plan one captured graph. Raises BudgetInfeasible, PlanMismatch.

    `resident_bytes(program)`: bytes beside it. `may_run`: single ops may be measured.
    """
    forms = Forms(joint, settings, may_run)
    if settings.plan is not None:
        form = forms.form(settings.plan.program.fissions)
        return settings.plan.for_graph(form.joint, form.program)
    program = forms.unsplit.program
    return forms.plan(replace(program, extra_resident_bytes=resident_bytes(program)), budget)


def read_once(program: Program, storages: Set[int]) -> Program:
    """`program` in which no op that reads one of `storages` may run again."""

    def pinned(op: Op) -> Op:
        reads = not program.is_folded(op) and not storages.isdisjoint(program.reads(op))
        if op.is_input or op.region == "backward" or not reads:
            return op
        return op.once

    return replace(program, ops=tuple(map(pinned, program.ops))) if storages else program
