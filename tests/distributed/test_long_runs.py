"""What must stay flat, over microbatches and over steps; stages that offload; a rank that dies within a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.long_runs import DEATH_S
from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


def long_run(*arguments: str) -> Any:
    (found,) = run(*arguments, module="tests.distributed.long_runs")
    return found


def check_training(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "error" not in rank, rank
        assert rank["gradients"] < 1e-5, rank
        assert rank["loss"] < 1e-5, rank
        assert rank["buffers"] == 0, rank


def check_flat(ranks: list[dict[str, Any]]) -> None:
    """Over many steps: peaks as foretold in every one; tensors, hooks, arenas and bytes at the sixth and last equal."""
    for rank in ranks:
        assert set(rank["peaks"]) == {rank["peaks"][0]}
        assert rank["predicted"] == pytest.approx(rank["peaks"][0], rel=0.02)
        early, late = rank["census"]
        assert early == late


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_peak_is_flat_in_the_number_of_microbatches(schedule: str) -> None:
    for few, more, most in long_run("microbatches", schedule, "4", "8", "16"):
        assert few == more == most


@pytest.mark.slow
def test_peak_is_flat_once_interleaved_zero_bubble_has_filled_its_pipeline() -> None:
    """Its first device warms up with five chunks and holds weight parts back: four microbatches don't fill it."""
    for more, most in long_run("microbatches", "interleaved-zb", "8", "16"):
        assert more == most


@pytest.mark.slow
def test_fifty_steps_leave_nothing_behind() -> None:
    ranks = long_run("steps", "1f1b", "4")
    check_training(ranks)
    check_flat(ranks)


@pytest.mark.slow
def test_stages_offload_under_a_budget_too_small_for_recomputation() -> None:
    found = long_run("tier", "gpipe", "8")
    assert found["budget"] < found["smallest"]
    check_training(found["ranks"])
    check_flat(found["ranks"])
    for rank in found["ranks"]:
        assert rank["gradients"] == rank["loss"] == 0
        assert rank["moved"] > 0
        assert max(rank["peaks"]) <= found["budget"]


@pytest.mark.parametrize(
    "arguments", [("mlp", "zbv", "4"), pytest.param(("gpt2", "interleaved-zb", "4"), marks=pytest.mark.slow)]
)
def test_backward_in_two_parts_reloads_what_was_offloaded(arguments: tuple[str, ...]) -> None:
    ranks = long_run("moved", *arguments)
    check_training(ranks)
    for rank in ranks:
        assert rank["engines"] == 2, "two stages a rank"
        assert rank["disk"] > 0
        assert rank["pending"] == 0


@pytest.mark.slow
def test_a_rank_that_dies_in_the_middle_of_a_step_ends_the_others() -> None:
    for number, rank in enumerate(long_run("death")):
        if number == 2:
            assert rank == {"error": "died"}
            continue
        assert rank["raised"].startswith(f"PipelineError: rank {number} (stages [{number}]): another rank stopped"), (
            rank
        )
        assert rank["after_s"] < 2 * DEATH_S
        assert rank["kept"] == [0], "a failed step holds nothing"
