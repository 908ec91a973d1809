"""Gradients made in forward, part by part: what a part's forward made may be made again there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.ir.program import Fission, Program
from fxmem.planners.kernel.binding import State
from fxmem.planners.recompute.interleaved import _Search, interleaved
from fxmem.planners.registry import Options
from fxmem.schedule import Recompute, StartBackward, simulate
from tests.planned import train
from tests.split_steps import Step

WIDTH, ROWS, NUM_LAYERS = 32, 512, 6


class Deep(nn.Module):
    """Layers whose activations are much larger than their weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(NUM_LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


def deep(dropout: float = 0.0) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Deep(dropout), (torch.randn(ROWS, WIDTH),)


def in_parts(module: nn.Module, args: tuple[Any, ...], num_parts: int = 2) -> list[Fission]:
    """The whole step along its rows, gradients in forward."""
    step = Step(module, args)
    return [step.fission(step.largest(torch.ops.aten.gelu.default), 0, num_parts, fuse=True)]


def split_program(dropout: float = 0.0) -> Program:
    module, args = deep(dropout)
    return fxmem.plan(module, args, fission=in_parts(module, args)).program


def num_again_in_forward(plan: fxmem.Plan) -> int:
    border = next(i for i, action in enumerate(plan.actions) if isinstance(action, StartBackward))
    return sum(isinstance(action, Recompute) for action in plan.actions[:border])


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_parts_are_recomputed_in_forward_where_all_saved_is_too_much(dropout: float) -> None:
    module, args = deep(dropout)
    fissions = in_parts(module, args)
    saved = fxmem.plan(module, args, fission=fissions)
    budget = int(0.85 * saved.peak_bytes)
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.plan(module, args, budget, planner="full", fission=fissions)  # recomputes in backward only
    torch.manual_seed(1)
    expected = train(fxmem.compile(module, fission=fissions), module, args)
    step = fxmem.compile(module, budget, fission=fissions)
    torch.manual_seed(1)
    for found, wanted in zip(train(step, module, args), expected, strict=True):
        assert torch.equal(found, wanted)
    assert num_again_in_forward(step.plan) > 0
    module.zero_grad()
    assert fxmem.measure(lambda: step(*args).backward()).peak_bytes == step.plan.peak_bytes <= budget


def test_the_smallest_budget_goes_below_what_all_of_a_part_needs() -> None:
    module, args = deep()
    fissions = in_parts(module, args)
    least = fxmem.plan(module, args, "min", fission=fissions)
    assert least.peak_bytes < 0.75 * fxmem.plan(module, args, fission=fissions).peak_bytes
    assert least.lower_bound_s <= least.extra_s


def test_states_are_judged_as_the_simulator_does() -> None:
    problem = interleaved(split_program())
    assert problem is not None
    search = _Search(problem, 1 << 40, Options())
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        drops = [
            (int(k), int(s))
            for k in range(problem.num_forward, problem.num_kernels)
            for s in problem.reads(k)
            if torch.rand((), generator=generator) < 0.3
        ]
        state = search._lazy(State(search.kernel.all_saved().saved, tuple(drops)))
        search.kernel.load(state)
        score = search.kernel.evaluate(0)
        result = simulate(problem.program, search._solution(state).actions)
        assert result.peak_bytes == score.peak_bytes
        assert result.seconds == pytest.approx(problem.baseline_s + score.extra_s)


def test_programs_without_parts_and_ones_whose_effects_would_change_places_are_left_alone() -> None:
    module, args = deep()
    assert interleaved(fxmem.plan(module, args).program) is None
    program = split_program()
    last = max(op.index for op in program.ops if op.fused == "forward" and op.recomputable)
    ops = list(program.ops)
    ops[last] = replace(ops[last], fused=None, is_random=True, recomputable=False)  # draws after the first gradients
    assert interleaved(program) is not None
    assert interleaved(replace(program, ops=tuple(ops))) is None


def test_files_carry_which_ops_are_of_parts() -> None:
    program = split_program()
    again = Program.from_json(program.to_json())
    assert [op.fused for op in again.ops] == [op.fused for op in program.ops]
    assert {op.fused for op in program.ops} == {None, "forward", "backward"}
