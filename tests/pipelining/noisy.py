"""A model factory during which the MILP solver prints a line of its own, whatever its options say."""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from torch import nn

from tests.zoo import build


def solve_noisily() -> None:
    """An integer program whose coefficients span ten orders of magnitude: HiGHS repairs its solution, and says so."""
    rng = np.random.default_rng(4)
    num, rows = int(rng.integers(3, 12)), int(rng.integers(2, 10))
    rng.uniform(-7, 4, (rows, 1))
    there = rng.random((rows, num)) < 0.6
    matrix = np.where(there, rng.normal(size=(rows, num)) * 10.0 ** rng.uniform(-4, 4, (rows, num)), 0)
    inside = np.round(rng.uniform(0, 5, num))
    low = matrix @ inside - np.abs(rng.normal(size=rows)) * 10.0 ** rng.uniform(-8, 0, rows)
    objective, integral = rng.normal(size=num), rng.random(num) < 0.6
    milp(objective, constraints=LinearConstraint(matrix, low, np.inf), integrality=integral, bounds=Bounds(0, 10))


def mlp() -> tuple[nn.Module, tuple[object, ...]]:
    solve_noisily()
    return build("mlp")
