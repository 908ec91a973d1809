"""Budgets as users write them: a number of bytes, a fraction of the unplanned peak, or the smallest feasible."""

from __future__ import annotations

import re
from typing import Literal

from fxmem.errors import OptionError

Budget = int | float | str | None
"""int bytes; "6GiB" or "500MB"; a float in (0, 1] of the unplanned peak; "min"; None for no limit."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_CHOICES = 'an int (bytes), "6GiB", "500MB", a float in (0, 1] (fraction of the unplanned peak), "min", or None'


def parse_bytes(text: str) -> int:
    """'6GiB' -> 6 * 2**30, '500MB' -> 500_000_000. Raises OptionError for anything else."""
    match = _QUANTITY.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise OptionError(
            f"malformed number of bytes {text!r}: expected a number with one of {', '.join(filter(None, _UNITS))}"
        )
    return int(float(match[1]) * units[match[2].lower()])


def resolve_budget(budget: Budget) -> int | float | Literal["min"] | None:
    """Validate `budget`: positive int bytes, a fraction in (0, 1], "min" or None. Raises OptionError."""
    if budget is None or budget == "min":
        return budget  # type: ignore[return-value]
    if isinstance(budget, str):
        budget = parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise OptionError(f"malformed budget {budget!r}: expected {_CHOICES}")
    if isinstance(budget, float) and not 0 < budget <= 1:
        raise OptionError(
            f"malformed budget {budget!r}: a float is a fraction in (0, 1]; for bytes give an int or a string"
        )
    if budget <= 0:
        raise OptionError(f"malformed budget {budget!r}: must be positive; expected {_CHOICES}")
    return budget
