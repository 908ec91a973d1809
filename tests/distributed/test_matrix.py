"""Models x schedules x ranks in real processes: exact losses, gradients, buffers; peaks as foretold and in budget."""

from __future__ import annotations

import json

import pytest

from bench.pipeline_matrix import MODELS, RANKS, SCHEDULES
from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


CELLS: dict[str, dict[int, list[str]]] = {
    "gpt2": {2: ["gpipe", "zbv"], 4: ["1f1b", "1f1b-n"]},
    "llama": {2: ["1f1b", "1f1b-n"], 4: ["interleaved"]},
    "t5": {2: ["interleaved"], 4: ["interleaved-zb"]},
    "resnet50": {2: ["interleaved-zb"]},
    "unet": {4: ["gpipe", "zbv"]},
}
"""By model and number of ranks; `python -m bench.pipeline_run --matrix` runs all."""


def test_every_schedule_runs_on_every_number_of_ranks() -> None:
    assert set(CELLS) == set(MODELS)
    cells = {(ranks, name) for of_model in CELLS.values() for ranks, names in of_model.items() for name in names}
    assert cells == {(ranks, name) for ranks in RANKS for name in SCHEDULES}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_schedule_on_two_or_four_ranks(model: str) -> None:
    """Three steps with momentum under a budget that most cells must recompute for."""
    cells = CELLS[model]
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
