"""The command line, run in this process."""

import json

import pytest
from click.testing import CliRunner

from fxmem.cli import main, parse_budget
from tests.models import blocks


def built():
    """What `package.module:function` returns."""
    return blocks()


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_plan_prints_saves_and_reports(tmp_path):
    files = {name: tmp_path / name for name in ("plan.json", "report.html")}
    result = run(
        "plan", "tests.test_cli:built", "--budget", "0.8", "--json",
        "--save", str(files["plan.json"]), "--report", str(files["report.html"]),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["peak_bytes"] <= figures["budget_bytes"]
    assert json.loads(files["plan.json"].read_text())["peak_bytes"] == figures["peak_bytes"]
    assert "gelu" in files["report.html"].read_text()


def test_measure_is_under_the_budget():
    result = run("measure", "tests.test_cli:built", "--budget", "0.8", "--json")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["measured_bytes"] == row["predicted_bytes"] <= row["budget_bytes"]


def test_the_table_is_whole_at_80_columns():
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["measure", "tests.test_cli:built", "--budget", "0.8"])
    assert result.exit_code == 0, result.output
    assert all(heading in result.output for heading in ("budget", "predicted", "measured", "extra op %", "bound %"))
    assert "…" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "tests.test_cli:built", "--budget", "1000"), "smallest feasible"),
        (("plan", "tests.test_cli:built", "--budget", "lots"), "malformed"),
        (("plan", "nosuch", "--budget", "0.5"), "gpt2"),
        (("plan", "no.such:thing", "--budget", "0.5"), "can't load"),
        (("plan", "tests.test_cli:built", "--budget", "0.5", "--planner", "magic"), "auto"),
    ],
)
def test_mistakes_are_messages(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("text", "budget"), [("0.5", 0.5), ("1", 1.0), ("5000", 5000), ("6GiB", "6GiB"), ("min", "min")]
)
def test_budgets_as_typed(text, budget):
    assert parse_budget(text) == budget
