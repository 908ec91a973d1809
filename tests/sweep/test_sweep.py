"""The sweep over torch's databases: a small sample under the smallest budget, and what it calls a fault."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from bench.sweep import Trial, _tried, detached, main, rows, sampled

OPS = ("addmm", "cumsum", "mul in place", "nn_functional_dropout", "var_mean", "linalg_qr", "sort", "index_add")
OPS += ("index_put",)
MODULES = ("nn_BatchNorm1d", "nn_GELU", "nn_Conv2d", "nn_Embedding")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [("ops", OPS), ("modules", MODULES)])
def test_sample_has_eagers_gradients_under_the_smallest_budget(kind: str, names: tuple[str, ...]) -> None:
    found = {row["case"]: (row["outcome"], row["detail"]) for row in rows(kind, names, timeout_s=600)}
    assert found == dict.fromkeys(names, ("same", ""))


def trial() -> Trial:
    return Trial(lambda x, y: (x * y).sum(), (torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)), {})


def test_right_gradients_are_no_outcome_and_none_stay_behind() -> None:
    made = trial()
    expected = made.gradients(lambda step: step)
    assert _tried(made, lambda step: step, expected) is None
    assert [x.grad for x in made.args] == [None, None]


@pytest.mark.parametrize(
    ("wrong", "outcome"),
    [
        (lambda step: lambda x, y: step(x * 1.01, y), ("differs", "loss 0 by 0.03")),
        (lambda step: lambda x, y: step(x, y.detach()), ("differs", "gradient 1 is missing")),
        (lambda step: 1 / 0, ("raises", "ZeroDivisionError: division by zero")),
    ],
)
def test_wrong_and_missing_gradients_and_errors_are_outcomes(wrong: Any, outcome: tuple[str, str]) -> None:
    made = trial()
    assert _tried(made, wrong, made.gradients(lambda step: step)) == outcome


def test_samples_are_cut_from_the_graph_that_made_them() -> None:
    def graph() -> Tensor:
        return torch.ones(2, requires_grad=True) * 2

    (x,), options = detached(((graph(),), {"y": graph(), "n": 3}))
    assert all(t.is_leaf and t.requires_grad for t in (x, options["y"]))
    assert options["n"] == 3


def test_sample_is_even_and_always_the_same() -> None:
    names = [str(i) for i in range(100)]
    assert sampled(names, 4) == ["0", "25", "50", "75"]
    assert sampled(names, None) == names
    assert len(sampled(names, 30)) == 30


@pytest.mark.parametrize(("outcome", "exit_code"), [("same", 0), ("differs", 1)])
def test_what_a_resumed_file_holds_is_not_run_again(tmp_path: Path, outcome: str, exit_code: int) -> None:
    file = tmp_path / "ops.jsonl"
    file.write_text(json.dumps({"case": "no such operator", "outcome": outcome, "detail": "", "seconds": 1}) + "\n")
    result = CliRunner().invoke(main, ["ops", "no such operator", "--resume", str(file)])
    assert f"1 {outcome}" in result.output
    assert result.exit_code == exit_code
