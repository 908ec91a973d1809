"""The plan of a graph in a step of no known kind: for what stands now, and a guess at what may follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from fxmem.budget import Budget, resolve_budget
from fxmem.errors import BudgetInfeasible, PlanMismatch
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.planners.plan import Plan, judge
from fxmem.schedule import Machine, simulate
from fxmem.step.graph import Graph, Variant, code_beside
from fxmem.step.known import Known, unplanned_bytes

_LOSS = 5  # times the gradients of the outputs: what a loss outside of the model is taken to need, until it was seen
_BESIDE_LOSS = 2  # the same, if a loss is among them
_RESERVE = 1 / 5  # of the budget: the same, where outputs are small beside it (a matrix of all pairs, say)
_SHARES = (0.99, 2 / 3)  # of what there is room for, tried where there is none for all that a loss outside may need
_SMALLEST = "made for the smallest budget"
_SMALL_BYTES = 4096
_NUMBER_BYTES = 16  # a loss is a number: nothing follows it


@dataclass(frozen=True)
class Surroundings:
    """What a graph is called in. `beside_bytes`: that stand beside a program of it now. `others_bytes`: that may, too.

    `kinds`: of steps that are known. `may_be_over`: do other calls wait that were planned without knowing of this one,
    or is the budget a fraction of a step that may call more than this graph? `warn`: is called if it is.
    """

    settings: Settings
    budget: Budget
    beside_bytes: Callable[[Program], int]
    others_bytes: int
    kinds: Iterable[Known]
    may_be_over: bool
    warn: Callable[[], None]

    def suitable(self, graph: Graph, values: Mapping[str, int]) -> Variant | None:
        """The fastest variant of `graph` that fits; None: a new one is needed."""
        program = self._standing(graph, values)
        fastest = sorted(graph.variants, key=lambda v: v.plan.extra_s if v.plan else 0.0)
        return next((variant for variant in fastest if self._suits(graph, variant, program)), None)

    def suits(self, graph: Graph, variant: Variant, values: Mapping[str, int]) -> bool:
        """May `graph` run as `variant`, and does that fit?"""
        return self._suits(graph, variant, self._standing(graph, values))

    def _standing(self, graph: Graph, values: Mapping[str, int]) -> Program:
        """The program of `graph` with what stands beside it, and may come."""
        program = graph.captured.program.at(values)
        if self.settings.plan is not None or self.budget is None:
            return program
        return _standing_beside(program, self.beside_bytes(program), self._guess(graph, program))

    def _suits(self, graph: Graph, variant: Variant, program: Program) -> bool:
        plan = variant.plan
        if plan is None or not graph.may_run(variant):
            return False
        return self._holds(plan, graph.forms.program(plan.program.fissions, program))

    def _holds(self, plan: Plan, program: Program) -> bool:
        """Is `program`, a graph with what stands beside it, within the budget under `plan`?"""
        if self.settings.plan is not None:
            return True
        if self.budget is None:
            return plan.budget_bytes is None or plan.extra_s == 0
        if self.budget == "min":
            return plan.notes.get(_SMALLEST, False) and plan.program.hints == program.hints
        asked = resolve_budget(self.budget)
        assert isinstance(asked, (int, float))
        limit_bytes = int(asked * unplanned_bytes(program)) if isinstance(asked, float) else asked
        return simulate(program, plan.actions, plan.machine).peak_bytes <= limit_bytes

    def plan(self, graph: Graph, values: Mapping[str, int]) -> Plan:
        """Raises BudgetInfeasible, PlanMismatch."""
        if self.settings.plan is not None:
            return _as_given(self.settings.plan, graph, values)
        program, limit = graph.captured.program.at(values), self.budget
        if limit is None:
            return graph.forms.plan(program, None)
        beside = self.beside_bytes(program)
        if graph.may_be_followed:
            limit = "min"  # more graphs follow, and nobody knows yet what they need
        guess = _Guess() if limit == "min" else self._guess(graph, program)
        shares = [1.0, 0.0] if guess.nbytes else [0.0]
        while True:
            made = guess.times(shares.pop(0))
            program = _standing_beside(program, beside, made)
            try:
                plan = _without_gap(graph.forms.plan(program, limit))
            except BudgetInfeasible as error:
                if not shares:
                    return self._least(graph, program, error)
                if made == guess and guess.gap:
                    room = max(0.0, 1 - (error.min_bytes - error.budget_bytes) / guess.nbytes)
                    shares = [share * room for share in _SHARES if room] + shares
            else:
                return replace(plan, notes={**plan.notes, _SMALLEST: True}) if limit == "min" else plan

    def _least(self, graph: Graph, program: Program, error: BudgetInfeasible) -> Plan:
        """The least that the graph can do with, if the step may be over its budget, once: then it is known.

        Raises `error` where this graph is known to be the step.
        """
        if not error.actions or not self.may_be_over:
            beside = "".join(f" (not planned: {code})" for code in code_beside([graph]))
            raise error.of(error.asked, error.graph, beside) from error
        self.warn()
        form = error.form or ()
        split = graph.forms.program(form, program)
        plan = judge(split, error.actions, self.settings.planner, None, Machine())
        return replace(plan, budget_bytes=error.budget_bytes, joint=graph.forms.form(form).joint)

    def _guess(self, graph: Graph, program: Program) -> _Guess:
        """What comes on top of a graph alone: as in a known step of it, or a loss outside of the model."""
        for known in self.kinds:
            if known.is_alive and known.prefix[0][0] == graph.number and len(known.parts) == 1:
                return _Guess(throughout=known.beside_at(program))
        tangents = [program.nbytes()[s] for s in program.tangents]
        gradients = sum(nbytes for nbytes in tangents if nbytes > _SMALL_BYTES)
        if any(nbytes <= _NUMBER_BYTES for nbytes in tangents):  # the loss is inside
            return _Guess(throughout=self.others_bytes + _BESIDE_LOSS * gradients)
        reserve = int(_RESERVE * self.budget) if isinstance(self.budget, int) else 0
        return _Guess(self.others_bytes, max(_LOSS * gradients, reserve))


@dataclass(frozen=True)
class _Guess:
    """Bytes that may come beside a graph: `throughout`, and in the `gap` between its forward and its backward."""

    throughout: int = 0
    gap: int = 0

    @property
    def nbytes(self) -> int:
        return self.throughout + self.gap

    def times(self, factor: float) -> _Guess:
        return _Guess(int(self.throughout * factor), int(self.gap * factor))


def _standing_beside(program: Program, beside_bytes: int, guess: _Guess) -> Program:
    return replace(program, extra_resident_bytes=beside_bytes + guess.throughout).with_gap(guess.gap)


def _without_gap(plan: Plan) -> Plan:
    if not plan.program.gap_bytes:
        return plan
    program = plan.program.with_gap(0)
    peak_bytes = simulate(program, plan.actions, plan.machine).peak_bytes
    return replace(plan, program=program, peak_bytes=peak_bytes, baseline_peak_bytes=unplanned_bytes(program))


def _as_given(given: Plan, graph: Graph, values: Mapping[str, int]) -> Plan:
    if given.program.reference.graph != graph.captured.joint.fingerprint:
        graph.expect(graph.beside_the_loss)
    form = graph.forms.form(given.program.fissions)
    plan = given.for_graph(form.joint, form.program.at(values))
    forbidden = graph.rereads(plan) & graph.pinned
    if forbidden:
        names = " and ".join(map(graph.input_name, forbidden))
        raise PlanMismatch(f"the plan computes again from {names}, overwritten between forward and backward")
    return plan
