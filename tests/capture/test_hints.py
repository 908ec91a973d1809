"""Hints in the model: `keep`, `recompute` and torch's own checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.capture import capture
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.schedule import Recompute

SIZE = 64


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0, keeps: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE) + 0.5)
        self.dropout, self.keeps = dropout, keeps

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.weight / SIZE).sin()
        x = fxmem.keep(x) if self.keeps else x
        return F.dropout(x.exp().cos(), self.dropout).tanh().sigmoid()


class Model(nn.Module):
    """Four blocks, under torch's checkpoints or as `hint` makes them."""

    def __init__(self, hint="", **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**options) for _ in range(4))
        self.hint = hint
        if hint == "module":
            for block in self.blocks:
                fxmem.recompute(block)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.hint == "checkpoint":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.hint == "function":
                x = fxmem.recompute(lambda y, block=block: block(y))(x)
            else:
                x = block(x)
        return x.square().sum()


def step_of(budget, *args, **options):
    torch.manual_seed(0)
    model = Model(*args, **options)
    step = fxmem.compile(copy.deepcopy(model), budget=budget, solve_s=0.2)
    x = torch.rand(SIZE, SIZE)
    results = []
    for run in (model, step):
        torch.manual_seed(3)
        loss = run(x)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in run.parameters())])
    assert all(map(torch.equal, *results))
    return step


@pytest.mark.parametrize("hint", ["checkpoint", "function", "module"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_without_a_budget_the_plan_is_what_the_checkpoints_ask_for(hint, dropout):
    plain, step = step_of(None, dropout=dropout), step_of(None, hint, dropout=dropout)
    assert plain.plan.extra_s == 0
    plan, ops = step.plan, step.plan.program.ops
    again = {ops[a.op].target for a in plan.actions if isinstance(a, Recompute)}
    assert again >= {"aten.mm.default", "aten.sin.default", "aten.exp.default", "aten.cos.default"}
    assert ("aten.native_dropout.default" in again) == (dropout > 0)
    assert plan.peak_bytes < 0.7 * plan.baseline_peak_bytes
    assert plan.baseline_peak_bytes == plain.plan.peak_bytes


@pytest.mark.parametrize("budget", [1.0, 0.95, 0.5])
@pytest.mark.parametrize("planner", ["auto", "none"])
def test_no_plan_needs_more_than_the_checkpoints(budget, planner):
    model = Model("checkpoint")
    args = (torch.rand(SIZE, SIZE),)
    wish = fxmem.plan(model, args)
    need_bytes = wish.peak_bytes
    assert need_bytes < 0.7 * wish.baseline_peak_bytes
    if planner == "none" and budget == 0.5 and int(budget * wish.baseline_peak_bytes) < need_bytes:
        with pytest.raises(fxmem.BudgetInfeasible):
            fxmem.plan(model, args, budget, planner=planner)
        return
    plan = fxmem.plan(model, args, budget, planner=planner)
    assert plan.budget_bytes == int(budget * wish.baseline_peak_bytes)
    assert plan.peak_bytes <= min(need_bytes, plan.budget_bytes)


def test_what_is_kept_is_not_recomputed():
    plan = step_of("min", "checkpoint", keeps=True).plan
    kept = [op for op in plan.program.ops if op.target == "aten.sin.default" and op.region == "forward"]
    assert len(kept) == 4
    assert not any(op.recomputable for op in kept)
    assert not {a.op for a in plan.actions if isinstance(a, Recompute)} & {op.index for op in kept}


def test_results_of_a_region_are_saved_and_hints_are_in_json():
    (joint,) = capture(Model("checkpoint"), (torch.rand(SIZE, SIZE),))
    program = program_from_joint(joint)
    outputs = [op for op in program.ops if op.target == "aten.sigmoid.default"]
    assert [op.hint for op in outputs] == [""] * 4
    assert [op.hint for op in program.ops if op.target == "aten.exp.default"] == ["recompute"] * 4
    assert Program.from_json(program.to_json()) == program


def test_outside_a_compilation_hints_do_nothing():
    x = torch.rand(4, 4, requires_grad=True)
    assert fxmem.keep(x) is x
    model = Model("module")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].weight.zero_()
    assert not torch.equal(model(x.new_ones(SIZE, SIZE)), twin(x.new_ones(SIZE, SIZE))), "a copy runs its own weights"
    assert list(model.state_dict()) == [f"blocks.{i}.weight" for i in range(4)]
    assert fxmem.recompute(F.relu)(x).equal(F.relu(x))
