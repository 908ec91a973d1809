"""`fxmem.plan` and Plan: ahead of time, saved and loaded, applied; options and errors."""

import json

import pytest
import torch
from torch import nn

import fxmem
from tests.models import Blocks, blocks, gradients


@pytest.fixture(scope="module")
def planned():
    module, args = blocks()
    return module, args, fxmem.plan(module, args, budget=0.75)


def test_figures(planned):
    _, _, plan = planned
    assert plan.peak_bytes <= plan.budget_bytes == int(0.75 * plan.baseline_peak_bytes)
    assert plan.gap == (plan.extra_s - plan.lower_bound_s) / plan.baseline_s
    assert plan.peak_expr == plan.peak_bytes
    names = [node.name for node in plan.graph_module.graph.nodes]
    assert any(name.endswith("_remat") for name in names)
    assert "recompute" in str(plan)


def test_a_saved_plan_applies_to_the_same_model_only(planned, tmp_path):
    module, args, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = fxmem.Plan.load(tmp_path / "plan.json")
    assert loaded.actions == plan.actions
    assert loaded.peak_bytes == plan.peak_bytes
    step = fxmem.compile(module, plan=loaded)
    step(*args).backward()
    found = gradients(module)
    module(*args).backward()
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(module), strict=True))
    assert step.plan.actions == plan.actions
    other = fxmem.compile(Blocks(num_blocks=3), plan=loaded)
    with pytest.raises(fxmem.PlanMismatch, match="made for"):
        other(*args).backward()


@pytest.mark.parametrize("text", ["not json", "{}", '{"format": "other"}', "[]"])
def test_a_file_that_is_no_plan(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(fxmem.PlanMismatch):
        fxmem.Plan.load(tmp_path / "plan.json")


def test_a_tampered_schedule_is_refused(planned, tmp_path):
    data = planned[2].to_json()
    data["actions"] = [row for row in data["actions"] if row[0] != "Recompute"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(fxmem.PlanMismatch, match="does not hold a valid plan"):
        fxmem.Plan.load(tmp_path / "plan.json")


def test_meta_and_fake_give_the_graph_of_real_tensors(planned):
    _, args, plan = planned
    with torch.device("meta"):
        meta = Blocks()
        meta_args = tuple(torch.empty_like(x, device="meta") for x in args)
    ahead = fxmem.plan(meta, meta_args, budget=0.75)
    assert ahead.program.fingerprint == plan.program.fingerprint
    assert ahead.baseline_peak_bytes == plan.baseline_peak_bytes


def test_planning_meta_tensors_allocates_nothing_like_an_activation():
    with torch.device("meta"):
        module = Blocks(width=1024)
        args = (torch.empty(65536, 1024), torch.empty(65536, 1024))
    peak = fxmem.measure(lambda: fxmem.plan(module, args, budget=0.8)).peak_bytes
    assert peak < 65536 * 1024 * 4 / 100


def test_optimizer_state_counts(planned):
    module, args, plan = planned
    nbytes = sum(p.nbytes for p in module.parameters())
    with_adam = fxmem.plan(module, args, optimizer=torch.optim.Adam(module.parameters()))
    extra = with_adam.peak_bytes - plan.baseline_peak_bytes
    assert 2 * nbytes <= extra <= 2 * nbytes + 64 * len(list(module.parameters()))


@pytest.mark.slow
def test_max_batch_fits_and_one_more_does_not():
    module, args = blocks(batch=8)
    budget = 4_000_000
    best = fxmem.max_batch(module, args, budget=budget)
    wide = [tuple(torch.randn(n, 32) for _ in range(2)) for n in (best, best + 1)]
    assert fxmem.plan(module, wide[0], budget=budget).peak_bytes <= budget
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.plan(module, wide[1], budget=budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": 1}, "did you mean 'budget'"),
        ({"planner": "magic"}, "choose one of"),
        ({"tiers": "tape"}, "host, disk"),
        ({"inner": "xla"}, "eager, inductor"),
        ({"solve_s": -1}, "positive"),
        ({"optimizer": "adam"}, "torch.optim.Optimizer"),
        ({"loss_fn": 3}, "callable"),
        ({"budget": "many"}, "malformed"),
        ({"device_spec": "abacus"}, "h100"),
        ({"plan": "plan.json"}, "fxmem.Plan"),
    ],
)
def test_bad_options_name_the_choices(options, message):
    module, args = blocks()
    with pytest.raises(fxmem.OptionError, match=message):
        fxmem.plan(module, args, **options)


def test_uncapturable_model_names_its_line():
    class Prints(nn.Module):
        def forward(self, x):
            return torch.tensor(x.sum().item() * 2.0, requires_grad=True) * x.tolist()[0]

    with pytest.raises(fxmem.CaptureError, match="test_plan"):
        fxmem.plan(Prints(), (torch.randn(4),))


@pytest.mark.parametrize("planner", ["auto", "exact", "rotor", "full"])
def test_a_program_that_computes_nothing(planner):
    weight = torch.nn.Parameter(torch.ones(3, 3))

    def view(x):
        return weight.t()

    for budget in (None, "min", weight.nbytes):
        assert fxmem.plan(view, (torch.ones(2),), budget, planner=planner).peak_bytes == weight.nbytes
    with pytest.raises(fxmem.BudgetInfeasible, match=f"({weight.nbytes} bytes)"):
        fxmem.plan(view, (torch.ones(2),), weight.nbytes - 1, planner=planner)
