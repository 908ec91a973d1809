"""Budgets as users write them."""

import pickle

import numpy as np
import pytest

from fxmem.budget import parse_bytes, resolve_budget
from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.units import format_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("6GiB", 6 * 2**30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("12", 12), ("3gib", 3 * 2**30)],
)
def test_bytes(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "budget",
    [
        "6 parsecs", "-1GiB", "", "GiB", 0, -5, 1.5, 0.0, True, [1], "1e3", "1.5", "0.0", "9" * 5000, float("nan"),
        float("inf"), np.int64(0), np.float32(2), np.bool_(True), 1j, b"6GiB",
    ],
)  # fmt: skip
def test_malformed_budgets_name_the_choices(budget):
    with pytest.raises(OptionError, match="malformed"):
        resolve_budget(budget)


@pytest.mark.parametrize(
    ("budget", "resolved"),
    [
        (None, None), ("min", "min"), (0.5, 0.5), (7, 7), ("1KiB", 1024), ("0.7", 0.7), (" .5 ", 0.5), ("1.0", 1.0),
        ("1", 1), ("0.5KiB", 512), (np.int64(5), 5), (np.float32(0.5), 0.5),
    ],
)  # fmt: skip
def test_resolve(budget, resolved):
    found = resolve_budget(budget)
    assert found == resolved
    assert type(found) is type(resolved)


def test_format():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**40)] == ["0 B", "1023 B", "1.50 KiB", "1.00 TiB"]


def test_infeasible_shows_what_stands_at_the_peak():
    error = BudgetInfeasible(10, 2048, [("wte.weight", 1024)])
    assert error.min_bytes == 2048
    assert "2048 bytes" in str(error)
    assert "wte.weight" in str(error)


def test_infeasible_says_what_was_asked_of_which_graph():
    error = BudgetInfeasible(10, 2048, [("wte.weight", 1024)], " on rank 1").of(0.5, "step [abc], 12 ops")
    assert str(error).startswith("no plan fits 10 B (10 bytes, budget=0.5) on rank 1;")
    assert "of graph step [abc], 12 ops" in str(error)
    assert "wte.weight" in str(error)
    assert "budget=" not in str(error.of(10, ""))


def test_infeasible_crosses_processes():
    error = BudgetInfeasible(10, 2048, [("wte.weight", 1024)]).of("min", "step")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.min_bytes, again.at_peak, again.asked) == (2048, error.at_peak, "min")
