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
        ({"tiers": 3}, "'auto' for all"),
        ({"tiers": ["host", ["disk"]]}, "host, disk"),
        ({"planner": ["auto"]}, "planner's name"),
        ({"inner": []}, "eager, inductor"),
        ({"solve_s": "5"}, "number of seconds"),
        ({"solve_s": float("nan")}, "positive"),
        ({"dynamic": "yes"}, "True or False"),
        ({"device_spec": 3}, "preset's name"),
        ({"offload_dir": "/tmp"}, "tiers="),
        ({"tiers": "disk", "offload_dir": 3}, "folder's path"),
        ({"tiers": "disk", "offload_dir": "/nowhere/at/all"}, "No such file or directory"),
        ({"tiers": "disk", "offload_dir": __file__}, "Not a directory"),
        ({"tiers": "disk", "offload_dir": "a\0b"}, "null byte"),
    ],
)
def test_bad_options_name_the_choices(options, message):
    module, args = blocks()
    with pytest.raises(fxmem.OptionError, match=message):
        fxmem.plan(module, args, **options)
    with pytest.raises(fxmem.OptionError, match=message):
        fxmem.compile(module, **options)


def test_auto_does_without_a_disk_that_cannot_be_used(caplog):
    module, args = blocks()
    plan = fxmem.plan(module, args, tiers="auto", offload_dir="/nowhere/at/all")
    assert list(plan.machine.links) == ["host"]
    assert "/nowhere/at/all" in caplog.text


def test_a_disk_that_fails_later_is_named(monkeypatch, tmp_path):
    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxmem.analysis.doctor._measure_disk", fails)
    module, args = blocks()
    with pytest.raises(fxmem.OffloadError, match=f"{tmp_path} can't be used"):
        fxmem.plan(module, args, 0.9, tiers="disk", offload_dir=tmp_path)


def test_uncapturable_model_names_its_line():
    class Prints(nn.Module):
        def forward(self, x):
            return torch.tensor(x.sum().item() * 2.0, requires_grad=True) * x.tolist()[0]

    with pytest.raises(fxmem.CaptureError, match="test_plan"):
        fxmem.plan(Prints(), (torch.randn(4),))
