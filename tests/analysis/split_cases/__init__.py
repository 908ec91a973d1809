"""Sample calls of every op that has a split rule, by the families of `fxmem.analysis.split_families`."""

from __future__ import annotations

from typing import Any

from tests.analysis.split_cases import (
    contractions,
    elementwise,
    images,
    indexing,
    losses,
    normalisation,
    reductions,
    views,
)
from tests.analysis.split_cases.draw import Case

_FAMILIES = (contractions, views, elementwise, reductions, normalisation, images, indexing, losses)

CASES: dict[Any, Case] = {op: case for family in _FAMILIES for op, case in family.CASES.items()}
"""Op (an overload, or a packet for its default) -> what draws its arguments."""
