"""Hints in the model: `keep`, `recompute` and torch's own checkpoints."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import fxmem
from fxmem.capture import capture
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.planners import Options
from fxmem.planners.plan import make_plan
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
        if self.hint == "sequential":
            return checkpoint_sequential([*self.blocks, nn.Identity()], 5, x, use_reentrant=False).square().sum()
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


@pytest.mark.parametrize(
    ("hint", "dropout"), [("checkpoint", 0.3), ("sequential", 0.3), ("function", 0.0), ("module", 0.3)]
)
def test_without_a_budget_the_plan_is_what_the_checkpoints_ask_for(hint, dropout):
    plan = step_of(None, hint, dropout=dropout).plan
    ops = plan.program.ops
    again = {ops[a.op].target for a in plan.actions if isinstance(a, Recompute)}
    assert again >= {"aten.mm.default", "aten.sin.default", "aten.exp.default", "aten.cos.default"}
    assert ("aten.native_dropout.default" in again) == (dropout > 0)
    assert plan.peak_bytes < 0.7 * plan.baseline_peak_bytes


def test_no_plan_needs_more_than_the_checkpoints():
    args = (torch.rand(SIZE, SIZE),)
    plain, wish = fxmem.plan(Model(), args), fxmem.plan(Model("checkpoint"), args)
    assert plain.extra_s == 0
    assert plain.peak_bytes == wish.baseline_peak_bytes, "fractions are of the peak with everything saved"
    assert wish.peak_bytes < 0.7 * wish.baseline_peak_bytes
    for planner in ("auto", "none"):
        plan = make_plan(wish.program, 0.95, planner, Options(solve_s=0.2))
        assert plan.budget_bytes == int(0.95 * wish.baseline_peak_bytes)
        assert plan.peak_bytes <= wish.peak_bytes
    smaller = make_plan(wish.program, wish.peak_bytes - 1, "auto", Options(solve_s=0.2))
    assert smaller.peak_bytes < wish.peak_bytes
    with pytest.raises(fxmem.BudgetInfeasible):
        make_plan(wish.program, wish.peak_bytes - 1, "none")


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
