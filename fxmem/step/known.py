"""Kinds of steps that were seen: which calls they make, what was measured beside them, and the plan they run by."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fxmem.budget import Budget
from fxmem.ir.program import Program
from fxmem.options import Settings
from fxmem.planners.plan import Plan, judge, unplanned
from fxmem.schedule import Action, Compute, SimResult, simulate
from fxmem.step.call import Call, Key
from fxmem.step.episode import Episode
from fxmem.step.forms import Fissions, Forms
from fxmem.step.graph import Graph, Variant, code_beside
from fxmem.step.graph_plan import plan_form, plan_joined
from fxmem.step.joined import Beside, Joined, Made, Part, Segment, join, with_numbers
from fxmem.step.levels import Level

StepFissions = tuple[Fissions, ...]
"""How the graph of each call is split."""

_COMPILING_BYTES = 4096
"""So much may a step that compiles something leave over: constants, numbers as tensors."""


@dataclass(eq=False)
class Known:
    """One kind of step. `parts`, `order`: its calls and their backwards; `beside`: what was measured around them.

    `variants`: what each call runs; `fissions`: how its graph is split there. `plan`: of the whole step.
    `is_differentiated`: a backward ran in eager mode, under `create_graph`. `argument_bytes`: the most seen, by call.
    """

    prefix: tuple[Key, ...]
    graphs: tuple[weakref.ref[Graph], ...]
    values: tuple[Mapping[str, int], ...]
    parts: tuple[Part, ...]
    order: tuple[int, ...]
    beside: Beside
    variants: list[Variant]
    fissions: StepFissions
    plan: Plan
    unplanned_bytes: int
    argument_bytes: list[int]
    is_differentiated: bool = False
    margin_bytes: int = 0
    num_retries: int = 0
    is_verified: bool = False
    needs_plan: bool = False
    is_improved: bool = False
    is_least: bool = False
    failure: Exception | None = field(default=None, repr=False)

    @property
    def is_alive(self) -> bool:
        """Are its graphs still those that Dynamo runs, and may they be run as its plan says?"""
        found = [ref() for ref in self.graphs]
        pairs = zip(found, self.variants, strict=True)
        return all(graph is not None and graph.may_run(variant) for graph, variant in pairs)

    @property
    def is_plain(self) -> bool:
        """One call, and nothing that comes and goes beside it: its own program says all."""
        return len(self.parts) == 1 and not self.beside.during and not self.beside.before and not self.parts[0].dropped

    @property
    def may_be_several(self) -> bool:
        """Was the first plan made before anyone knew what else is called, or that nothing is?"""
        return len(self.parts) > 1 or any(g.may_be_followed for ref in self.graphs if (g := ref()) is not None)

    @property
    def forms(self) -> list[Forms]:
        """Of the graph of each call."""
        return [graph.forms for ref in self.graphs if (graph := ref()) is not None]

    @property
    def asked(self) -> StepFissions:
        """How its graphs are split where nothing better is found."""
        return tuple(forms.asked for forms in self.forms)

    def others(self, fissions: StepFissions) -> list[StepFissions]:
        """`fissions`, with one more graph split."""
        own = self.forms
        whole = dict.fromkeys(forms for forms, chosen in zip(own, fissions, strict=True) if chosen == forms.asked)
        return [
            tuple(other if forms is split else chosen for forms, chosen in zip(own, fissions, strict=True))
            for split in whole
            for other in split.others
        ]

    def refuse_parts(self) -> None:
        """See `Forms.refuse_parts`, of every graph."""
        for forms in self.forms:
            forms.refuse_parts()

    def keep_least(self) -> bool:
        """Let calls whose backward never comes save as little as they can; False if they do already."""
        is_changed = False
        for position, (ref, part, variant) in enumerate(zip(self.graphs, self.parts, self.variants, strict=True)):
            graph = ref()
            if graph is None or part.has_backward:
                continue
            found = graph.with_plan(graph.forms.plan(graph.captured.program.at(self.values[position]), "min"))
            if found.saved_bytes < variant.saved_bytes:
                self._fix(position, graph, found)
                is_changed = True
        return is_changed

    def _fix(self, position: int, graph: Graph, variant: Variant) -> None:
        """The call at `position`, whose backward never comes, runs as `variant`."""
        assert variant.plan is not None
        fissions = variant.plan.program.fissions
        program = with_numbers(graph.forms.form(fissions).program, self.values[position])
        part = replace(self.parts[position], program=program, kept=_kept(program, variant))
        self.variants[position] = variant
        self.parts = (*self.parts[:position], part, *self.parts[position + 1 :])
        self.fissions = (*self.fissions[:position], fissions, *self.fissions[position + 1 :])

    def joined(self, fissions: StepFissions | None = None) -> Joined:
        """The step as one program, with what was measured beside it and the margin of its retries."""
        beside = replace(self.beside, throughout=self.beside.throughout + self.margin_bytes)
        chosen = zip(self.parts, self.forms, self.values, fissions or self.fissions, strict=True)
        parts = [
            replace(part, program=with_numbers(f.form(own).program, values)) if part.has_backward else part
            for part, f, values, own in chosen
        ]
        return join(parts, self.order, beside)

    def program(self, position: int, fissions: Fissions | None = None) -> Program:
        """The program of one call with what stands throughout; its sizes stay symbols."""
        form = self.forms[position].form(self.fissions[position] if fissions is None else fissions)
        beside = self.beside.throughout + self.margin_bytes
        return replace(form.program.at(self.values[position]), extra_resident_bytes=beside)

    def notes(self, fissions: StepFissions) -> dict[str, Any]:
        """For a report: what is split in its graphs, and why others are not."""
        found: dict[str, Any] = {}
        for forms, own in dict.fromkeys(zip(self.forms, fissions, strict=True)):
            for key, lines in forms.notes(own).items():
                found.setdefault(key, []).extend(lines)
        return found

    def whole(self, fissions: StepFissions) -> Program:
        """The step as one program, its graphs split so."""
        return self.program(0, fissions[0]) if self.is_plain else self.joined(fissions).program

    def planned(self, fissions: StepFissions, settings: Settings, budget: Budget, share: float = 1.0) -> Plan:
        """A plan of all its calls, their graphs split so. Raises BudgetInfeasible."""
        joints = [forms.form(own).joint for forms, own in zip(self.forms, fissions, strict=True)]
        start = self.plan.actions if fissions == self.fissions else None
        if self.is_plain:
            return plan_form(self.program(0, fissions[0]), joints[0], settings, budget, share, start)
        return plan_joined(self.joined(fissions), joints, settings, budget, share, start)

    def plan_of(self, position: int, actions: tuple[Action, ...]) -> Plan:
        """The plan of one call, out of the plan of the step: its peak is the step's."""
        if self.is_plain:
            return self.plan
        program = self.program(position)
        released = (program.forward_outputs[number] for number in sorted(self.parts[position].dropped))
        program = replace(program, released=tuple(released))
        alone = simulate(program, actions, self.plan.machine).peak_bytes
        beside = program.extra_resident_bytes + max(0, self.plan.peak_bytes - alone)
        whole = replace(program, extra_resident_bytes=beside)
        plan = judge(whole, actions, self.plan.planner, None, self.plan.machine)
        return replace(plan, budget_bytes=self.plan.budget_bytes, notes=self.plan.notes)

    @property
    def plan_shown(self) -> Plan:
        """Of the step; where that is one call, a plan of its graph, that can be saved and used again."""
        return self.plan_of(0, self.plan_actions) if len(self.parts) == 1 and self.is_alive else self.plan

    def beside_at(self, program: Program) -> int:
        """For a step of one call like this one, but of other sizes: what comes on top, in proportion."""
        own = with_numbers(self.program(0), self.values[0])
        more = self.plan.peak_bytes - simulate(own, self.plan_actions, self.plan.machine).peak_bytes
        programs = (own.reference, program)
        sizes = [sum(n for s, n in enumerate(p.nbytes()) if s not in p.resident) for p in programs]
        return max(0, int(more * max(1.0, sizes[1] / max(1, sizes[0]))))

    @property
    def unplanned_code(self) -> str:
        """What runs that no plan reaches, for an error's text."""
        found = code_beside([graph for ref in self.graphs if (graph := ref()) is not None])
        found += ["backward under create_graph"] if self.is_differentiated else []
        return f" (not planned: {'; '.join(found)})" if found else ""

    @property
    def plan_actions(self) -> tuple[Action, ...]:
        """What the only call runs."""
        plan = self.variants[0].plan
        assert plan is not None
        return plan.actions

    def see_arguments(self, position: int, nbytes: int) -> int:
        """By how much the storages behind a call's arguments exceed the most that was seen: they count from now on."""
        more = max(0, nbytes - self.argument_bytes[position])
        if more:
            self.argument_bytes[position] = nbytes
            self.add_bytes(more)
        return more

    def add_bytes(self, nbytes: int) -> None:
        """So many more stand throughout."""
        self.beside = replace(self.beside, throughout=self.beside.throughout + nbytes)
        self.unplanned_bytes += nbytes
        program = self.plan.program
        self.plan = replace(
            self.plan,
            program=replace(program, extra_resident_bytes=program.extra_resident_bytes + nbytes),
            peak_bytes=self.plan.peak_bytes + nbytes,
            baseline_peak_bytes=self.plan.baseline_peak_bytes + nbytes,
        )
        self.is_verified = False


def backwards(episode: Episode) -> tuple[int, ...]:
    """The calls of graphs that have a backward, by their positions, in the order of their first backwards."""
    planned = [call.number for call in episode.calls if call.variant.plan is not None]
    return tuple(planned.index(number) for number in dict.fromkeys(episode.backward_order) if number in planned)


def learn(episode: Episode, levels: Mapping[Segment, Level], standing_more_bytes: int) -> Known:
    """What a measured episode teaches. `standing_more_bytes`: to be counted though it did not stand this time."""
    calls = [call for call in episode.calls if call.variant.plan is not None]
    by_number = {call.number: call for call in episode.calls}
    renumbered = {call.number: position for position, call in enumerate(calls)}
    order = backwards(episode)
    never = {n for n in renumbered if order and renumbered[n] not in order and not by_number[n].is_open}
    parts = tuple(_part(call, renumbered, by_number, call.number in never) for call in calls)
    bare = join(parts, order)
    schedules = [plan.actions for plan in episode.plans]
    found = {(region, renumbered[n]): level for (region, n), level in levels.items() if n in renumbered}
    own, merged = episode.plans[0], bare.merge(schedules)
    run = simulate(bare.program, merged, own.machine)
    noise_bytes = _COMPILING_BYTES if episode.has_compiled else 0
    beside = _beside(bare, run, merged, found, noise_bytes)
    beside = replace(beside, throughout=beside.throughout + standing_more_bytes)
    known = Known(
        prefix=episode.prefix,
        graphs=tuple(weakref.ref(call.graph) for call in calls),
        values=tuple(call.values for call in calls),
        parts=parts,
        order=order,
        beside=beside,
        variants=[call.variant for call in calls],
        fissions=tuple(plan.program.fissions for plan in episode.plans),
        plan=own,
        unplanned_bytes=0,
        argument_bytes=[call.argument_bytes for call in calls],
        is_differentiated=any(call.is_differentiated for call in calls),
    )
    known.plan = _judged(known, calls, schedules)
    known.unplanned_bytes = known.plan.baseline_peak_bytes
    return known


def _judged(known: Known, calls: Sequence[Call], schedules: Sequence[tuple[Action, ...]]) -> Plan:
    """The plan of the step as it ran, with what was learned counted."""
    own = calls[0].variant.plan
    assert own is not None
    if known.is_plain:
        program = replace(own.program.at(calls[0].values), extra_resident_bytes=known.beside.throughout)
        plan = judge(program, schedules[0], own.planner, None, own.machine)
    else:
        joined = known.joined()
        plan = judge(joined.program, joined.merge(schedules), own.planner, None, own.machine)
    bound_s = max(0.0, min(own.lower_bound_s, plan.extra_s)) if len(calls) == 1 else 0.0
    joint = own.joint if known.is_plain else None
    return replace(
        plan,
        budget_bytes=own.budget_bytes,
        lower_bound_s=bound_s,
        solve_s=own.solve_s,
        notes=own.notes,
        joint=joint,
    )


def _part(call: Call, renumbered: Mapping[int, int], calls: Mapping[int, Call], has_no_backward: bool) -> Part:
    assert call.variant.plan is not None
    joint = call.graph.captured.joint
    program = with_numbers(call.graph.forms.form(call.variant.plan.program.fissions).program, call.values)
    origins: dict[int, Made | Key] = {}
    for index, position in call.graph.inputs:
        origin = call.origin(position, renumbered, calls)
        if origin is not None:
            origins.update((s, origin) for s in program.ops[index].storages if s not in origins)
    for op in program.ops:  # constants of the graph stand with it
        if op.is_input and op.region == "forward" and joint.nodes[op.index].op == "get_attr":
            origins.update((s, ("own", call.graph.number, s)) for s in op.storages)
    outputs = call.graph.outputs
    dropped = frozenset(outputs[i] for i in call.dropped if i in outputs)
    kept = _kept(program, call.variant) if has_no_backward else None
    return Part(program, origins, call.graph.gradients, dropped, kept)


def _kept(program: Program, variant: Variant) -> frozenset[int]:
    return frozenset(program.producer[s] for s in variant.saved)


def _beside(
    joined: Joined,
    run: SimResult,
    actions: Sequence[Action],
    levels: Mapping[Segment, Level],
    noise_bytes: int,
) -> Beside:
    """What was measured over what the calls themselves account for, segment by segment; up to `noise_bytes` is none."""
    more: dict[Segment, int] = {}
    at_start: dict[Segment, int] = {}
    for segment, level in levels.items():
        if segment not in joined.first:
            continue
        first, last = (actions.index(Compute(mark[segment])) for mark in (joined.first, joined.last))
        at_start[segment] = int(run.bytes_at[first])
        peak = int(run.bytes_at[first : last + 1].max())
        excess = max(level.start - at_start[segment], level.peak - peak, level.end - int(run.bytes_at[last]))
        more[segment] = excess if abs(excess) > noise_bytes else 0
    throughout = min(more.values(), default=0)  # below 0: outputs' gradients that never came, say
    floor = max((level.end for level in levels.values()), default=0)  # with all gradients: no plan needs less
    during = {segment: n - throughout for segment, n in more.items() if n > throughout}
    gaps = {s: levels[s].before - at_start[s] - n for s, n in more.items() if levels[s].before > floor}
    before = {segment: gap for segment, gap in gaps.items() if gap > 0}
    return Beside(throughout, during, before)


def unplanned_bytes(program: Program) -> int:
    """The peak of `program` with everything saved."""
    return unplanned(program).peak_bytes
