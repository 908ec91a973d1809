"""`fxmem pipeline` as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

RUN = [sys.executable, "-c"]


def _run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RUN, code, *args], capture_output=True, text=True, timeout=240, check=True)


@pytest.mark.slow
def test_stdout_is_one_json_document_while_the_solver_prints() -> None:
    alone = _run("from tests.pipelining.noisy import solve_noisily; solve_noisily()")
    assert alone.stdout, "this version of the solver prints nothing: find another problem"
    done = _run(
        "from fxmem.cli import main; main()", "pipeline", "tests.pipelining.noisy:mlp", "--num-stages", "2",
        "--num-microbatches", "4", "--budget", "1.0", "--solve-s", "0.1", "--optimizer", "none", "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["num_microbatches"] == 4
    assert alone.stdout in done.stderr
