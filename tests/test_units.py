"""Budgets as users write them."""

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


@pytest.mark.parametrize("budget", ["6 parsecs", "-1GiB", "", "GiB", 0, -5, 1.5, 0.0, True, [1], "1e3"])
def test_malformed_budgets_name_the_choices(budget):
    with pytest.raises(OptionError, match="malformed"):
        resolve_budget(budget)


@pytest.mark.parametrize(("budget", "resolved"), [(None, None), ("min", "min"), (0.5, 0.5), (7, 7), ("1KiB", 1024)])
def test_resolve(budget, resolved):
    assert resolve_budget(budget) == resolved


def test_format():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**40)] == ["0 B", "1023 B", "1.50 KiB", "1.00 TiB"]


def test_infeasible_shows_what_stands_at_the_peak():
    error = BudgetInfeasible(10, 2048, [("wte.weight", 1024)])
    assert error.min_bytes == 2048
    assert "2048 bytes" in str(error)
    assert "wte.weight" in str(error)
