"""`fxmem.compile` with data parallelism around it and collectives inside: exact, in budget, one plan on all ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _cold_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was measured before, as it is the first time."""
    monkeypatch.setenv("FXMEM_CACHE", str(tmp_path))


def two_ranks(name: str) -> list[dict[str, Any]]:
    (ranks,) = run(name, module="tests.distributed.parallel")
    for rank in ranks:
        assert "error" not in rank, rank
        assert all(rank["equal"]), "gradients to the bit"
        assert max(rank["peaks"]) < rank["unplanned"]
        assert rank["plans"]
        assert rank["run"] == rank["collectives"], "each exactly once"
        assert all(rank["order"]), "in one order on all ranks, whatever their plans"
    return list(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp"])
def test_a_whole_model_in_its_budget(name: str) -> None:
    """In every step: FSDP2 has shards beside the whole parameters."""
    first, second = two_ranks(name)
    assert first["plans"] == second["plans"]
    for rank in (first, second):
        assert max(rank["peaks"]) <= rank["predicted"][0] <= min(1.01 * max(rank["peaks"]), rank["budgets"][0])
        assert rank["extra_s"][0] > 0


@pytest.mark.slow
def test_fsdp_block_by_block() -> None:
    first, second = two_ranks("fsdp-blocks")
    assert first["plans"] == second["plans"]
    assert len(first["plans"]) == 4


@pytest.mark.slow
def test_a_fraction_of_a_step_whose_blocks_are_graphs_of_their_own() -> None:
    first, second = two_ranks("fsdp-joined")
    assert first["plans"] == second["plans"]
    assert len(first["plans"]) == 4
    for rank in (first, second):
        assert len(set(rank["budgets"])) == 1, "one budget, of the whole step"
        assert 0.5 * rank["unplanned"] < min(rank["peaks"]) <= rank["budgets"][0] < 0.72 * rank["unplanned"]


@pytest.mark.slow
def test_collectives_inside_a_model() -> None:
    first, second = two_ranks("collectives")
    assert first["plans"] == second["plans"]
    for rank in (first, second):
        assert rank["collectives"] == [16], "four blocks, forward and backward, each with its wait"
        assert min(rank["peaks"]) <= rank["budgets"][0], "gloo's own thread may hold what was sent a little longer"


@pytest.mark.slow
def test_collectives_inside_models_whose_plans_differ() -> None:
    first, second = two_ranks("unlike")
    assert first["plans"] != second["plans"]
    assert first["extra_s"] > second["extra_s"]
