"""torch's own `activation_memory_budget` on a plan's graph, predicted by the simulator: nothing is run.

AOTAutograd's min-cut partitioner writes a forward and a backward graph; what both hold is computed again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.errors import PlanMismatch
from fxmem.ir.program import Program
from fxmem.planners.plan import Plan, judge
from fxmem.planners.problem import reduce_program
from fxmem.schedule import Action, Compute, Machine, Recompute, StartBackward
from fxmem.schedule.simulate import without_unread_states

SWEEP = tuple(i / 10 for i in range(11))
"""Settings that are tried: from everything that may be recomputed to nothing."""


def torch_plans(plan: Plan, settings: Sequence[float]) -> list[Plan]:
    """The graph of `plan` as torch would train it at each of `settings`, which is the last word of its `planner`.

    Raises PlanMismatch for a plan that was loaded, or whose graph was split: torch has no such graph.
    """
    if plan.joint is None or plan.program.unsplit is not None:
        raise PlanMismatch("torch's partitioner needs a captured graph that is not split: plan without a budget first")
    return [_planned(plan.program, plan.joint, setting) for setting in settings]


def _planned(program: Program, joint: JointGraph, setting: float) -> Plan:
    halves = compat.min_cut_partition(
        _copied(joint.graph_module), joint.num_forward_outputs, joint.static_indices, setting
    )
    actions = tuple(_actions(program, *halves))
    again = {action.op for action in actions if isinstance(action, Recompute)}
    allowed = tuple(replace(op, recomputable=op.recomputable or op.index in again) for op in program.ops)
    torchs = replace(program, ops=allowed)
    name = f"torch activation_memory_budget {setting:g}"
    return judge(torchs, without_unread_states(torchs, actions), name, None, Machine())


def _actions(program: Program, forward: fx.GraphModule, backward: fx.GraphModule) -> Iterator[Action]:
    index = {op.name: op.index for op in program.ops}
    kernels = set(reduce_program(program).kernel_op.tolist())
    early = _kernels(forward, index, kernels)
    yield from map(Compute, early)
    yield StartBackward()
    yield from (Compute(op.index) for op in program.ops if op.is_input and op.region == "backward")
    for op in _kernels(backward, index, kernels):
        yield Recompute(op) if op in early else Compute(op)


def _kernels(half: fx.GraphModule, index: dict[str, int], kernels: set[int]) -> list[int]:
    found = (index.get(node.name, -1) for node in half.graph.nodes if node.op == "call_function")
    return [op for op in found if op in kernels]


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """The partitioner rewrites what it is given."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)
