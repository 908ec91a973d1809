"""`fxmem.pipeline` in real processes: every rank plans, rank 0 decides; exact gradients, peaks as foretold."""

import json
from typing import Any

import pytest

from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


def check(*cases: list[Any]) -> list[list[dict[str, Any]]]:
    """(model, schedule, ranks, microbatches, rows, budget) each: what every rank found."""
    results: list[list[dict[str, Any]]] = run("planned", *map(json.dumps, cases))
    assert len(results) == len(cases)
    for case, ranks in zip(cases, results, strict=True):
        for rank in ranks:
            assert "error" not in rank, (case, rank)
            assert rank["gradients"] < 1e-5, (case, rank)
            assert rank["loss"] < 1e-5, (case, rank)
            assert rank["buffers"] == 0, (case, rank)
            assert len(set(rank["peaks"])) == 1, "every step like the one before"
            assert abs(rank["predicted"] / rank["peaks"][0] - 1) <= 0.02, (case, rank)
            if rank["budget"] is not None:
                assert max(rank["peaks"]) <= rank["budget"], (case, rank)
    return results


@pytest.mark.slow
def test_tied_weights_under_a_budget_that_needs_recomputation() -> None:
    [roomy, tight] = check(["gpt2", "1f1b", 2, 4, 8, None], ["gpt2", "1f1b", 2, 4, 8, 0.75])
    assert tight[0]["budget"] < max(rank["predicted"] for rank in roomy)
    assert tight[0]["extra_s"] > 0


@pytest.mark.slow
def test_memory_of_1f1b_does_not_grow_with_the_number_of_microbatches() -> None:
    few, many = check(["mlp", "1f1b", 2, 4, 8, None], ["mlp", "1f1b", 2, 12, 24, None])
    for a, b in zip(few, many, strict=True):
        losses = 8 * 4
        assert b["predicted"] - b["batch"] <= a["predicted"] - a["batch"] + losses
        assert max(b["peaks"]) - b["batch"] <= max(a["peaks"]) - a["batch"] + losses


@pytest.mark.slow
def test_a_budget_too_small_fails_on_every_rank() -> None:
    [ranks] = run("planned", json.dumps(["mlp", "auto", 2, 4, 8, 10_000]))
    assert ranks[0] == ranks[1]
    assert ranks[0]["error"].startswith("BudgetInfeasible: no plan fits 9.77 KiB (10000 bytes) on rank")


@pytest.mark.slow
def test_schedules_of_a_model_without_tied_weights() -> None:
    """Those that the matrix leaves out, too."""
    check(*(["mlp", schedule, 2, 4, 8, None] for schedule in ("zero-bubble", "interleaved-zb", "dualpipev")))


@pytest.mark.slow
def test_a_last_stage_in_parts_keeps_budgets_that_it_could_not_keep_whole() -> None:
    """Gradients in backward and in forward; a backward whole and in two."""
    for ranks in check(["tagger", "1f1b", 2, 4, 8, "min"], ["tagger", "zero-bubble", 2, 4, 8, 0.6]):
        assert all(rank["split"] for rank in ranks)


@pytest.mark.slow
def test_smaller_microbatches_are_split_as_the_first_is() -> None:
    """What was foretold is for the first, the largest."""
    [ranks] = run("planned", json.dumps(["tagger", "1f1b", 2, 4, 10, 0.6]))
    for rank in ranks:
        assert rank["split"]
        assert rank["gradients"] < 1e-5
        assert max(rank["peaks"]) <= 1.001 * rank["predicted"]
