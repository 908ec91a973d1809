"""`fxmem.compile(..., tiers=...)`: bytes leave the device, the budget is kept, gradients are bitwise the same."""

import pytest
import torch

import fxmem
from tests.models import blocks, gradients


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_offloaded_step_keeps_its_budget_and_gradients(tier, tmp_path):
    module, args = blocks(batch=2048)
    module(*args).backward()
    expected = gradients(module)
    step = fxmem.compile(module, budget="min", tiers=tier, offload_dir=tmp_path, solve_s=3)
    for _ in range(3):
        step(*args).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), expected, strict=True))
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    assert measured == step.plan.peak_bytes <= step.plan.budget_bytes
    assert step.plan.simulation.bytes_moved > 0
