"""Passes, schedules, planners, layouts and engines with one fault each, and their right versions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxmem.ir.program import Program
from fxmem.passes.base import effect_of
from fxmem.planners.plan import Plan, baseline_actions
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.registry import Options, Solution
from fxmem.runtime.transfers.engine import StepState, Transfer
from fxmem.runtime.transfers.layout import Layout, Slot, lay_out
from fxmem.runtime.transfers.threads import ThreadEngine
from fxmem.schedule import Action, Compute, Free, Offload, Recompute, Reload, StartBackward, Wait

aten = torch.ops.aten

# passes over any GraphModule


def calls(gm: fx.GraphModule, where: Callable[[fx.Node], bool] = lambda n: True) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and where(n)]


def is_mutating(node: fx.Node) -> bool:
    return effect_of(node) == "mutating"


def unchanged(gm: fx.GraphModule) -> fx.GraphModule:
    return gm


def without_dead_code(gm: fx.GraphModule) -> None:
    gm.graph.eliminate_dead_code()
    gm.recompile()


def rebuilt(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def wrong_order(gm: fx.GraphModule) -> None:
    """Updates happen as soon as what they need is there, before those who were to read the old value."""
    for node in calls(gm, is_mutating):
        nodes = list(gm.graph.nodes)
        last = max(node.all_input_nodes, key=nodes.index)
        last.append(node)
    gm.recompile()


def late_updates(gm: fx.GraphModule) -> None:
    """Updates whose result nobody names happen at the end, after those who were to read the new value."""
    output = gm.graph.output_node()
    for node in calls(gm, lambda n: is_mutating(n) and not n.users):
        output.prepend(node)
    gm.recompile()


def stale_buffer(gm: fx.GraphModule) -> None:
    """What the graph reads is replaced by its value of now, as if it were constant."""
    for node in list(gm.graph.find_nodes(op="get_attr")):
        value = getattr(gm, node.target)
        if not isinstance(value, torch.nn.Parameter):
            setattr(gm, f"{node.target}_folded", value.detach().clone())
            node.target = f"{node.target}_folded"
    gm.recompile()


def lost_update(gm: fx.GraphModule) -> None:
    """Whatever has no users is dead."""
    for node in reversed(calls(gm)):
        if not node.users:
            gm.graph.erase_node(node)
    gm.recompile()


def redrawn_mask(gm: fx.GraphModule) -> None:
    """Each reader of a random op gets a run of its own."""
    for node in calls(gm, lambda n: effect_of(n) == "random"):
        for user in list(node.users)[1:] + [u for u in node.users if u.op == "output"][:1]:
            with gm.graph.inserting_before(user):
                again = gm.graph.node_copy(node)
            user.replace_input_with(node, again)
    gm.recompile()


def merged_draws(gm: fx.GraphModule) -> None:
    """Equal calls are one call, random ones too."""
    seen: dict[Any, fx.Node] = {}
    for node in calls(gm, lambda n: not is_mutating(n)):
        first = seen.setdefault((node.target, str(node.args), str(node.kwargs)), node)
        if first is not node:
            node.replace_all_uses_with(first)
            gm.graph.erase_node(node)
    gm.recompile()


def lost_stride(gm: fx.GraphModule) -> None:
    """Results are laid out anew."""
    output = gm.graph.output_node()
    for node in [n for n in output.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]:
        with gm.graph.inserting_before(output):
            made = gm.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
        made.meta["val"] = node.meta["val"].clone(memory_format=torch.contiguous_format)
        output.replace_input_with(node, made)
    gm.recompile()


def accumulator_twice(gm: fx.GraphModule) -> None:
    """In-place additions are run again where their result is read."""
    for node in calls(gm, lambda n: n.target is aten.add_.Tensor):
        with gm.graph.inserting_after(node):
            gm.graph.node_copy(node)
    gm.recompile()


def not_recompiled(gm: fx.GraphModule) -> None:
    """Edits the graph, and leaves the code as it was."""
    for node in calls(gm, lambda n: n.target in (aten.tanh.default, aten.sigmoid.default)):
        node.target = aten.relu.default


def without_detach(gm: fx.GraphModule) -> None:
    """`detach` gives the same values, so it is dropped."""
    for node in calls(gm, lambda n: n.target is aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    gm.recompile()


def without_metadata(gm: fx.GraphModule) -> None:
    """Inserted nodes have no fake value."""
    for node in calls(gm, lambda n: isinstance(n.meta["val"], torch.Tensor) and n.meta["val"].is_floating_point()):
        with gm.graph.inserting_after(node):
            made = gm.graph.call_function(aten.alias.default, (node,))
        node.replace_all_uses_with(made, delete_user_cb=lambda user, made=made: user is not made)
    gm.recompile()


def half_precision(gm: fx.GraphModule) -> None:
    """A detour through bfloat16."""
    for node in calls(gm, lambda n: n.target is aten.mul.Tensor and n.meta["val"].dtype == torch.float32):
        with gm.graph.inserting_after(node):
            low = gm.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
        with gm.graph.inserting_after(low):
            back = gm.graph.call_function(aten._to_copy.default, (low,), {"dtype": torch.float32})
        low.meta["val"], back.meta["val"] = node.meta["val"].bfloat16(), node.meta["val"].clone()
        node.replace_all_uses_with(back, delete_user_cb=lambda user, low=low: user is not low)
    gm.recompile()


def wrong_getitem(gm: fx.GraphModule) -> None:
    """The second of two results for the first."""
    for node in calls(gm, lambda n: n.target is operator.getitem and n.args[1] == 0):
        if len(node.args[0].meta["val"]) > 1:
            node.args = (node.args[0], 1)
    gm.recompile()


RIGHT_PASSES = [unchanged, without_dead_code, rebuilt]
BROKEN_PASSES = [
    wrong_order, late_updates, stale_buffer, lost_update, redrawn_mask, merged_draws, lost_stride, accumulator_twice,
    not_recompiled, without_detach, without_metadata, half_precision, wrong_getitem,
]  # fmt: skip

# schedules of a plan


def _without_last(actions: Sequence[Action], where: Callable[[Action], bool]) -> tuple[Action, ...]:
    found = [i for i, action in enumerate(actions) if where(action)]
    return tuple(a for i, a in enumerate(actions) if not found or i != found[-1])


def as_planned(plan: Plan) -> tuple[Action, ...]:
    return plan.actions


def dropped_wait(plan: Plan) -> tuple[Action, ...]:
    return _without_last(plan.actions, lambda a: isinstance(a, Wait))


def dropped_reload(plan: Plan) -> tuple[Action, ...]:
    return tuple(a for a in plan.actions if not isinstance(a, (Reload, Wait)))


def freed_before_it_left(plan: Plan) -> tuple[Action, ...]:
    actions = list(plan.actions)
    for i, action in enumerate(actions):
        if isinstance(action, Free):
            j = actions.index(next(a for a in actions if isinstance(a, Offload) and a.storage == action.storage))
            actions.insert(j, actions.pop(i))
            break
    return tuple(actions)


def operands_after(plan: Plan) -> tuple[Action, ...]:
    """The last op of forward before what it reads."""
    actions = list(plan.actions)
    boundary = actions.index(StartBackward())
    order = [i for i in range(boundary) if isinstance(actions[i], Compute)]
    actions.insert(order[0], actions.pop(order[-1]))
    return tuple(actions)


def early_backward(plan: Plan) -> tuple[Action, ...]:
    actions = [a for a in plan.actions if not isinstance(a, StartBackward)]
    return (*actions, StartBackward())


def redrawn(plan: Plan) -> tuple[Action, ...]:
    """Random ops run again in backward."""
    again = [Recompute(op.index) for op in plan.program.ops if op.is_random and Compute(op.index) in plan.actions]
    boundary = plan.actions.index(StartBackward())
    return (*plan.actions[: boundary + 1], *again, *plan.actions[boundary + 1 :])


def never_recomputed(plan: Plan) -> tuple[Action, ...]:
    return tuple(a for a in plan.actions if not isinstance(a, Recompute))


RIGHT_SCHEDULES = [as_planned]
BROKEN_SCHEDULES = [
    dropped_wait, dropped_reload, freed_before_it_left, operands_after, early_backward, redrawn, never_recomputed,
]  # fmt: skip


# schedules of a captured graph


def played_as(program: Program, again: Iterable[int]) -> tuple[Action, ...]:
    """Everything saved, and `again` run once more when backward has its tangents."""
    actions = baseline_actions(reduce_program(program))
    num_tangents = sum(op.is_input and op.region == "backward" for op in program.ops)
    boundary = actions.index(StartBackward()) + 1 + num_tangents
    return (*actions[:boundary], *(Recompute(op) for op in again if Compute(op) in actions), *actions[boundary:])


def repeats_nothing(program: Program) -> tuple[Action, ...]:
    return played_as(program, ())


def repeats_what_it_may(program: Program) -> tuple[Action, ...]:
    may = (op.index for op in program.ops if op.recomputable and op.region == "forward" and not op.is_input)
    return played_as(program, [i for i in may if not program.is_folded(program.ops[i])])


def repeats_updates(program: Program) -> tuple[Action, ...]:
    return played_as(program, [op.index for op in program.ops if op.mutates])


def repeats_draws(program: Program) -> tuple[Action, ...]:
    return played_as(program, [op.index for op in program.ops if op.is_random])


def repeats_after_an_update(program: Program) -> tuple[Action, ...]:
    """What read a buffer runs again when it has changed."""
    ops = (op for op in program.ops if op.region == "forward" and not (op.is_input or op.mutates or op.is_random))
    return played_as(program, [op.index for op in ops if not op.recomputable and not program.is_folded(op)])


RIGHT_ORDERS = [repeats_nothing, repeats_what_it_may]
BROKEN_ORDERS = [repeats_updates, repeats_draws, repeats_after_an_update]


# planners


def saves_all(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Ignores the budget."""
    return Solution(baseline_actions(problem))


def proud(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Claims a bound that its own plan undercuts."""
    from fxmem.planners.registry import get_planner

    solution = get_planner("full")(problem, budget_bytes, options)
    return replace(solution, lower_bound_s=solution.lower_bound_s + 1e6)


# layouts and engines


def shares_too_early(slots: Iterable[Slot], staged: bool = False) -> Layout:
    """A staging place is free again halfway through its copy."""
    slots = list(slots)
    short = [replace(s, stages=tuple((a, (a + b) // 2) for a, b in s.stages)) for s in slots]
    made = lay_out(short, staged)
    return replace(made, slots=tuple(replace(p, stages=s.stages) for p, s in zip(made.slots, slots, strict=True)))


def forgets_the_second_reload(slots: Iterable[Slot], staged: bool = False) -> Layout:
    """A place is free again after its first reload."""
    slots = list(slots)
    made = lay_out([replace(s, last=s.stages[1][1]) for s in slots], staged)
    return replace(made, slots=tuple(replace(p, last=s.last) for p, s in zip(made.slots, slots, strict=True)))


class ForgetsToWait(ThreadEngine):
    """`wait` returns at once."""

    def _finish_in(self, state: StepState, transfer: Transfer, target: torch.Tensor) -> None:
        pass


class NeverCopiesOut(ThreadEngine):
    """What lies in the arena already is given back."""

    def _copy_out(self, state: StepState, slot: int, source: torch.Tensor) -> None:
        pass


class OnePlace(ThreadEngine):
    """Everything leaves for the start of the arena."""

    def _copy_out(self, state: StepState, slot: int, source: torch.Tensor) -> None:
        arena, _ = state.place(slot)
        arena.host[: source.numel()] = source.numpy()


BROKEN_ENGINES = [ForgetsToWait, NeverCopiesOut, OnePlace]
