"""Budgets as users write them: a number of bytes, a fraction of the unplanned peak, or the smallest feasible."""

from __future__ import annotations

import numbers
import re
from fractions import Fraction
from typing import Any, Literal

from fxmem.errors import OptionError

Budget = int | float | str | None
"""int bytes; "6GiB" or "500MB"; a float in (0, 1] of the unplanned peak, also as "0.7"; "min"; None for no limit."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_QUANTITY = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)\s*")
_FRACTION = re.compile(r"\s*[0-9]{0,18}\.[0-9]{1,18}\s*")  # no unit, and bytes come whole
_CHOICES = 'an int (bytes), "6GiB", "500MB", a float in (0, 1] (fraction of the unplanned peak), "min", or None'


def parse_bytes(text: str) -> int:
    """'6GiB' -> 6 * 2**30, '500MB' -> 500_000_000. Raises OptionError for anything else."""
    match = _QUANTITY.fullmatch(text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise OptionError(
            f"malformed number of bytes {text!r}: expected a number with one of {', '.join(filter(None, _UNITS))}"
        )
    return int(Fraction(match[1]) * units[match[2].lower()])


def resolve_budget(budget: Budget) -> int | float | Literal["min"] | None:
    """Validate `budget`: positive int bytes, a fraction in (0, 1], "min" or None. Raises OptionError.

    Numbers of other kinds (numpy's) become Python's own.
    """
    if budget is None or (isinstance(budget, str) and budget == "min"):
        return budget  # type: ignore[return-value]
    number: Any = _from_text(budget) if isinstance(budget, str) else budget
    if isinstance(number, bool) or not isinstance(number, (int, float, numbers.Real)):
        raise OptionError(f"malformed budget {budget!r}: expected {_CHOICES}")
    if isinstance(number, numbers.Integral):
        if number <= 0:
            raise OptionError(f"malformed budget {budget!r}: must be positive; expected {_CHOICES}")
        return int(number)
    if not 0 < float(number) <= 1:
        raise OptionError(
            f"malformed budget {budget!r}: a float is a fraction in (0, 1]; for bytes give an int or text with a unit"
        )
    return float(number)


def _from_text(text: str) -> int | float:
    return float(text) if _FRACTION.fullmatch(text) else parse_bytes(text)
