"""Pipelines of models and loops as people write them: equal to one process, in training and in evaluation after it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.loops import CASES
from tests.distributed.test_pipeline import run

pytestmark = pytest.mark.distributed


def found_in(*names: str) -> dict[str, list[Any]]:
    return dict(zip(names, run(*names, module="tests.distributed.loops"), strict=True))


@pytest.mark.slow
def test_every_loop_is_that_of_one_process() -> None:
    for name, ranks in found_in(*CASES).items():
        for rank in ranks:
            assert "error" not in rank, (name, rank)
            assert rank["error_size"] < 1e-5, (name, rank)
        if name == "counts":
            assert sorted(b for rank in ranks for b in rank["buffers"]) == ["mean", "scale", "steps"]


@pytest.mark.slow
def test_ranks_that_ask_for_different_things_are_refused_on_all_of_them() -> None:
    first, second = found_in("unlike")["unlike"]
    assert first["told"] == second["told"]
    graphs, budgets, counts, models, done = first["told"]
    for told in (graphs, models):
        assert told.startswith("OptionError: all ranks must plan alike: rank 1 has captured the graph")
    assert budgets == "OptionError: all ranks must plan alike: rank 1 has budget 0.8, rank 0 0.9"
    assert counts.startswith("OptionError: all ranks must plan alike: rank 1 has microbatch_counts (4,), rank 0 (8")
    assert done == "done"


@pytest.mark.slow
def test_two_pipelines_side_by_side() -> None:
    for rank in found_in("two by two")["two by two"]:
        assert "error" not in rank, rank
        assert rank["error_size"] < 1e-6
