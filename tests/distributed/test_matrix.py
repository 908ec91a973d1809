"""Models x schedules x ranks in real processes: exact losses, gradients, buffers; peaks as foretold and in budget."""

from __future__ import annotations

import json

import pytest

from bench.pipeline_matrix import MODELS, RANKS, SCHEDULES
from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


_EVERY = 4


def cells_of(model: str) -> dict[int, list[str]]:
    """Three cells a model, so that every schedule runs on every number of ranks with some model.

    `python -m bench.pipeline_run --matrix` runs all.
    """
    shift = MODELS.index(model)
    return {ranks: list(SCHEDULES[(i + shift) % _EVERY :: _EVERY]) for i, ranks in enumerate(RANKS)}


def test_every_schedule_runs_on_every_number_of_ranks() -> None:
    cells = [(ranks, name) for model in MODELS for ranks, names in cells_of(model).items() for name in names]
    assert set(cells) == {(ranks, name) for ranks in RANKS for name in SCHEDULES}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_on_two_or_four_ranks(model: str) -> None:
    """Three steps with momentum under a budget that most cells must recompute for."""
    cells = cells_of(model)
    rows = run("matrix", model, json.dumps(cells))
    assert len(rows) == sum(ranks * len(schedules) for ranks, schedules in cells.items())
    for row in rows:
        assert "failure" not in row, str(row)
        assert row["gradient_error"] < 1e-5, row
        assert row["loss_error"] < 1e-5, row
        assert row["buffer_error"] == 0, row
        assert abs(row["error"]) < 0.02, row
        assert row["measured_bytes"] <= row["budget_bytes"], row
    assert any(row["recomputes"] for row in rows)
