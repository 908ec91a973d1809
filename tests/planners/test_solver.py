"""The solver: right answers, bounds that hold when it is cut off, the same answer every time, effort counted."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.sparse import csc_array

from fxmem.planners.effort import Effort
from fxmem.planners.solver import Result, minimise

INTEGRAL, REAL = np.ones(12, dtype=np.bool_), np.zeros(12, dtype=np.bool_)


def program(size: int, num_rows: int, seed: int) -> tuple[np.ndarray, csc_array, np.ndarray]:
    rng = np.random.default_rng(seed)
    matrix = rng.integers(0, 9, (num_rows, size)).astype(float)
    return rng.integers(5, 30, size).astype(float), csc_array(matrix), 0.4 * matrix.sum(axis=1)


def solved(size: int, num_rows: int, seed: int, integral: np.ndarray, limit_s: float = 60.0) -> tuple[Result, Effort]:
    effort = Effort()
    found = minimise(*program(size, num_rows, seed), np.ones(size), integral, effort, limit_s)
    return found, effort


@pytest.mark.parametrize("seed", range(5))
def test_optimum_is_that_of_enumeration(seed: int) -> None:
    cost, matrix, low = program(12, 6, seed)
    points = np.array(list(product((0.0, 1.0), repeat=12)))
    best = (points @ cost)[np.all(points @ matrix.toarray().T >= low - 1e-9, axis=1)].min()
    found, effort = solved(12, 6, seed, INTEGRAL)
    assert found.is_optimal
    assert found.bound == pytest.approx(best)
    assert found.x is not None
    assert cost @ found.x == pytest.approx(best)
    assert effort.now() > 0
    relaxed, _ = solved(12, 6, seed, REAL)
    assert relaxed.bound <= best


def test_cut_off_answers_are_bounds_and_repeat() -> None:
    integral = np.ones(50, dtype=np.bool_)
    whole, effort = solved(50, 25, 0, integral)
    limit_s = effort.now() / 3
    first, spent = solved(50, 25, 0, integral, limit_s)
    again, as_much = solved(50, 25, 0, integral, limit_s)
    assert whole.is_optimal
    assert not first.is_optimal
    assert first.bound <= whole.bound + 1e-6
    assert spent.now() == pytest.approx(limit_s)
    assert (first.bound, spent.work) == (again.bound, as_much.work)
    assert first.x is None or np.array_equal(first.x, again.x)


def test_a_program_too_large_for_the_limit_is_not_begun() -> None:
    found, effort = solved(12, 6, 0, INTEGRAL, 1e-9)
    assert (found.x, found.bound, found.is_optimal, effort.work) == (None, -np.inf, False, 0)


def test_infeasible() -> None:
    cost, matrix, low = program(12, 6, 0)
    for integral in (INTEGRAL, REAL):
        found = minimise(cost, matrix, 10 * low, np.ones(12), integral, Effort(), 60.0)
        assert found.x is None
        assert found.bound == np.inf


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    solved(12, 6, 0, INTEGRAL)
    assert capfd.readouterr().out == ""
