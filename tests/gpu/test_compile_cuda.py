"""`fxmem.compile(..., tiers=...)` on a CUDA card: budget, gradients, levels, faults, hidden copies."""

from __future__ import annotations

import pytest
import torch

import fxmem
from bench.gpu_offload import run
from fxmem.schedule import Machine
from tests.models import blocks, gradients
from tests.runtime.transfers.test_compile_faults import FAST, check_disk_faults, check_levels

pytestmark = pytest.mark.gpu


@pytest.fixture
def fast_links(monkeypatch):
    """Links so fast that plans offload."""
    monkeypatch.setattr("fxmem.step.graph_plan.machine", lambda tiers, *_: Machine(dict.fromkeys(tiers, FAST)))


@pytest.mark.usefixtures("fast_links")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_budget_and_gradients(tier, tmp_path):
    module, args = blocks(batch=1 << 16)
    module, args = module.cuda(), tuple(x.cuda() for x in args)
    step = fxmem.compile(module, tiers=tier, offload_dir=tmp_path, solve_s=1)
    step(*args).backward()
    expected = gradients(module)
    step.set_budget(0.7)
    for _ in range(3):
        step(*args).backward()
        assert all(map(torch.equal, gradients(module), expected))
    assert fxmem.measure(lambda: step(*args).backward()).peak_bytes <= step.plan.budget_bytes
    assert step.plan.simulation.bytes_moved > 0


@pytest.mark.usefixtures("fast_links")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_levels_are_flat_over_200_steps(tier, tmp_path):
    check_levels(tier, tmp_path, "cuda")


@pytest.mark.usefixtures("fast_links")
def test_disk_faults_fail_one_step(tmp_path):
    check_disk_faults(tmp_path, "cuda")


def test_copies_hide_under_compute(tmp_path):
    """By events: a plan made for the measured link hides most of its copies."""
    row = run("unet", "small", "host", 0.7, torch.device("cuda", torch.cuda.current_device()), tmp_path)
    assert row["same_gradients"]
    assert row["measured_bytes"] <= row["budget_bytes"]
    if row["moved_bytes"]:
        assert row["copy_s"] > 0
        assert row["hidden_pct"] > 50
