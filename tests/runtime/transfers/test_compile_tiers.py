"""`fxmem.compile(..., tiers=...)`: bytes leave the device, the budget is kept, gradients are bitwise the same."""

import pytest
import torch

import fxmem
from fxmem.report.decisions import saved_tensors
from fxmem.schedule import Machine
from fxmem.schedule.simulate import Link
from tests.models import blocks, gradients


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_offloaded_step_keeps_its_budget_and_gradients(tier, tmp_path):
    module, args = blocks(batch=2048)
    module(*args).backward()
    expected = gradients(module)
    step = fxmem.compile(module, budget="min", tiers=tier, offload_dir=tmp_path, solve_s=3, fission="off")
    for _ in range(3):
        step(*args).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), expected, strict=True))
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    assert measured == step.plan.peak_bytes <= step.plan.budget_bytes
    assert step.plan.simulation.bytes_moved > 0


@pytest.mark.slow
def test_what_could_not_be_offloaded_is_reported_with_the_reason(tmp_path):
    class Returning(torch.nn.Module):
        def forward(self, x, y):
            return module(x, y).exp()  # backward reads what is returned

    module, args = blocks()
    plan = fxmem.plan(Returning(), args, 1.0, tiers="host")
    rows = [row for row in saved_tensors(plan) if row.stays]
    assert [row.stays for row in rows] == ["it is returned"]
    plan.save(tmp_path / "plan.json")
    for each in (plan, fxmem.Plan.load(tmp_path / "plan.json")):
        assert [row for row in saved_tensors(each) if row.stays] == rows
        assert rows[0].stays in str(each)
        each.report(tmp_path / "report.html")
        assert rows[0].stays in (tmp_path / "report.html").read_text()
    assert all(row.decision != "offload" for row in rows)
    assert "could not be offloaded" not in str(fxmem.plan(module, args, 1.0))


@pytest.mark.slow
def test_a_step_whose_host_is_full_goes_on_to_the_disk(tmp_path, monkeypatch):
    module, args = blocks(batch=2048)
    module(*args).backward()
    expected = gradients(module)
    links = {"host": Link(1e12, 1e12), "disk": Link(1e11, 1e11)}
    capacity = {"host": 512 << 10}
    monkeypatch.setattr("fxmem.step.graph_plan.machine", lambda *_: Machine(links, capacity))
    step = fxmem.compile(module, budget=0.6, tiers=("host", "disk"), offload_dir=tmp_path, solve_s=2)
    for _ in range(3):
        step(*args).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), expected, strict=True))
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    assert measured == step.plan.peak_bytes <= step.plan.budget_bytes
    held = step.plan.simulation.tier_peak_bytes
    assert 0 < held["host"] <= capacity["host"]
    assert held["disk"] > 0
