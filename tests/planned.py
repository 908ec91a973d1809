"""Run a module under a schedule chosen by a test, and compare steps bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxmem import compat
from fxmem.analysis.cost import annotate
from fxmem.capture import JointGraph
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.passes import rewrite
from fxmem.schedule.actions import Action
from fxmem.schedule.simulate import simulate
from fxmem.step.lower import Inner, Lowered, backend, lower

Choose = Callable[[Program], tuple[Action, ...]]


@dataclass
class Planned:
    """A compiled module under a schedule, and what was made of its (last) graph."""

    step: Callable[..., Any]
    joints: list[JointGraph] = field(default_factory=list)
    lowered: list[Lowered] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)


def planned(
    module: nn.Module, choose: Choose, inner: Inner = "eager", dynamic: bool = False, with_costs: bool = False
) -> Planned:
    """`module` compiled so that each of its graphs runs the schedule that `choose` makes for it.

    `with_costs`: the predicted peak counts what ops really allocate, workspaces included.
    """
    result = Planned(module)

    def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        program = program_from_joint(joint)
        if with_costs:
            program = annotate(program, joint.graph_module)
        actions = choose(program)
        rewritten = rewrite(joint, program, actions)
        halves = lower(rewritten)
        result.joints.append(rewritten)
        result.lowered.append(halves)
        result.peak_bytes.append(simulate(program, actions).peak_bytes)
        return halves.forward, halves.backward

    key = f"test {id(result)}"
    result.step = compat.isolated_compile(module, backend(partition, inner, key), dynamic=dynamic)
    return result


def train(step: Callable[..., Any], module: nn.Module, args: Sequence[Any], num_steps: int = 2) -> list[Tensor]:
    """Losses, gradients and buffers of some steps from fixed seeds; `module` is left as it was."""
    state = {name: value.clone() for name, value in module.state_dict().items()}
    seen: list[Tensor] = []
    for seed in range(num_steps):
        module.zero_grad()
        torch.manual_seed(seed)
        loss = step(*args)
        loss.backward()
        seen.append(loss.detach().clone())
        seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        seen += [b.clone() for b in module.buffers()]
    module.zero_grad()
    module.load_state_dict(state)
    return seen


def is_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Bitwise equality."""
    return len(one) == len(other) and all(map(torch.equal, one, other))
