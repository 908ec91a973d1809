"""Pipelines in real processes over gloo: losses, gradients and state equal to one process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
LIST_1F1B_N = [
    ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"],
    ["1F0", "1F1", "1I0", "1F2", "1W0", "1B1", "1F3", "1B2", "1B3"],
]


def run(*arguments: str, module: str = "tests.distributed.ranks", is_lines: bool = True) -> list[Any]:
    """The lines that `module` prints (or all of it) as JSON."""
    settings = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # give large tensors back to the system
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(text) for text in (done.stdout.splitlines() if is_lines else [done.stdout])]


def check(*cases: list[Any]) -> list[Any]:
    results = run("cases", *map(json.dumps, cases))
    assert len(results) == len(cases)
    for result in results:
        assert not result["errors"], result
        assert result["gradients"] < 1e-5, result
        assert result["loss"] < 1e-5, result
        assert result["buffers"] == 0, result
        assert result["all_keys"], "the ranks' state dicts together have the model's keys"
    return results


@pytest.mark.slow
def test_schedules_and_uneven_microbatches() -> None:
    """(model, schedule, ranks, stages, microbatches, rows): 8 rows are also 3 + 3 + 2."""
    check(
        ["mlp", "gpipe", 2, 2, 3, 8],
        ["mlp", "1f1b", 2, 2, 3, 8],
        ["mlp", "interleaved", 2, 4, 4, 8],
        ["mlp", "interleaved-zb", 2, 4, 4, 8],
        ["mlp", "zbv", 2, 4, 4, 8],
        ["mlp", LIST_1F1B_N, 2, 2, 4, 8],
    )


@pytest.mark.slow
def test_tied_weights_on_two_and_four_ranks() -> None:
    results = check(["gpt2", "1f1b", 4, 4, 2, 4], ["gpt2", "zbv", 2, 4, 4, 8])
    assert [r["shared"] for r in results] == [1, 0], "in a V the first and the last stage share a rank"


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("interleaved-zb", 4)])
def test_memory_does_not_grow_with_the_number_of_microbatches(schedule: str, num_stages: int) -> None:
    [(four, twelve)] = run("memory", schedule, str(num_stages))
    boundary_bytes = (1 << 15) * 16 * 4
    for few, many in zip(four, twelve, strict=True):
        assert many - few < 8 * boundary_bytes, "eight more microbatches, and not even one more tensor for each"
