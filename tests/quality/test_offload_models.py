"""Real models with the disk tier, at budgets that recomputation alone can't keep."""

import pytest

from bench.offload_models import run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_dropout", "resnet50_dropout", "unet_dropout", "unet"])
def test_trains_below_what_recomputation_alone_reaches(name, tmp_path):
    row = run(name, "tiny", "disk", tmp_path, solve_s=1)
    assert row["same_gradients"], row
    assert row["measured_bytes"] <= row["budget_bytes"], row
    assert row["floor_bytes"] <= row["alone_bytes"], row
    # Recomputation, dropout's draws included, gets down to about the largest op already: little is left for a tier.
    assert row["alone_bytes"] <= 1.05 * row["working_set_bytes"], row
    assert row["floor_bytes"] <= 1.04 * row["working_set_bytes"], row
