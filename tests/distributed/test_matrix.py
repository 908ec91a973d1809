"""Models x schedules x ranks in real processes: exact losses, gradients, buffers; peaks as foretold and in budget."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bench.pipeline_matrix import MODELS, RANKS, SCHEDULES
from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_on_two_and_four_ranks(model: str) -> None:
    """Three steps with momentum under a budget that most cells must recompute for."""

    def rows_of(ranks: int) -> list[dict[str, Any]]:
        arguments = ("--matrix", "--json", "--models", model, "--ranks", str(ranks))
        (rows,) = run(*arguments, module="bench.pipeline_run", is_lines=False)
        return list(rows)

    with ThreadPoolExecutor() as pool:  # one spends most of its time planning on one core, and so does the other
        rows = [row for found in pool.map(rows_of, RANKS) for row in found]
    assert len(rows) == len(SCHEDULES) * sum(RANKS)
    for row in rows:
        assert "failure" not in row, row
        assert row["gradient_error"] < 1e-5, row
        assert row["loss_error"] < 1e-5, row
        assert row["buffer_error"] == 0, row
        assert abs(row["error"]) < 0.02, row
        assert row["measured_bytes"] <= row["budget_bytes"], row
    assert any(row["recomputes"] for row in rows)
