"""The upper envelope of linear forms over monomials in positive integer symbols, in exact arithmetic.

A size is a dict monomial -> coefficient; what is no product of symbols (floor, Mod, ...) is one of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import sympy
from scipy.optimize import linprog

from fxmem.ir import sizes

Terms: TypeAlias = Mapping[sympy.Expr, Any]


def to_terms(size: int | sympy.Expr) -> Terms:
    """`size` expanded into monomial -> exact coefficient."""
    return {sympy.Integer(1): size} if isinstance(size, int) else _expanded(size)


@functools.lru_cache(4096)
def _expanded(size: sympy.Expr) -> Terms:
    coefficients = sympy.expand(size).as_coefficients_dict()
    return {m: int(c) if c.is_Integer else Fraction(int(c.p), int(c.q)) for m, c in coefficients.items()}


def add_terms(*parts: Terms) -> Terms:
    total: dict[sympy.Expr, Any] = dict(parts[0])
    for part in parts[1:]:
        for monomial, coefficient in part.items():
            total[monomial] = total.get(monomial, 0) + coefficient
    return {m: c for m, c in total.items() if c}


def to_expr(terms: Terms) -> sympy.Expr:
    return sympy.Add(*(_rational(c) * m for m, c in terms.items()))


def _rational(value: Any) -> sympy.Expr:
    return sympy.Rational(value.numerator, value.denominator)


def envelope(forms: Iterable[Terms], hints: Mapping[str, int]) -> list[Terms]:
    """Few of `forms` whose maximum is that of all, for all positive integers; the largest at `hints` first."""
    distinct = list({frozenset(form.items()): form for form in forms}.values())
    monomials = list({m: None for form in distinct for m in form})
    values = {m: sizes.evaluate(m, {**dict.fromkeys((s.name for s in m.free_symbols), 2), **hints}) for m in monomials}
    distinct.sort(key=lambda form: -sum(c * values[m] for m, c in form.items()))
    bounds = {m: _lower_and_upper(m) for m in monomials}
    kept: list[Terms] = []
    for form in distinct:
        if not any(_dominates(other, form, bounds) for other in kept):
            kept.append(form)
    kept = [f for i, f in enumerate(kept) if not any(_dominates(g, f, bounds) for g in kept[i + 1 :])]
    return _without_combinations(kept, bounds)


Bounds: TypeAlias = tuple[Terms, Terms]


def _dominates(above: Terms, below: Terms, bounds: Mapping[sympy.Expr, Bounds]) -> bool:
    """Is `above` >= `below` provably, for all positive integers?"""
    difference = add_terms(above, {m: -c for m, c in below.items()})
    return _is_nonnegative(difference, bounds)


def _is_nonnegative(form: Terms, bounds: Mapping[sympy.Expr, Bounds]) -> bool:
    """All coefficients are, after every symbol s is written 1 + t with t >= 0 and rounding is bounded from below."""
    shifted: dict[sympy.Expr, Any] = {}
    for monomial, coefficient in form.items():
        for key, factor in bounds[monomial][0 if coefficient > 0 else 1].items():
            shifted[key] = shifted.get(key, 0) + coefficient * factor
    return all(c >= 0 if m.is_nonnegative else c == 0 for m, c in shifted.items())


def _lower_and_upper(monomial: sympy.Expr) -> Bounds:
    """Polynomials in t = s - 1 below and above a monomial; both itself where nothing better is known."""
    rounded = [f for f in sympy.Mul.make_args(monomial) if not _is_power(f)]
    if not rounded:
        shifted = _shifted(monomial)
        return shifted, shifted
    opaque: Terms = {monomial: 1}
    if len(rounded) > 1 or not isinstance(rounded[0], (sympy.floor, sympy.ceiling)):
        return opaque, opaque
    inner, rest = rounded[0].args[0], monomial / rounded[0]
    if not all(_is_power(f) for term in to_terms(inner) for f in sympy.Mul.make_args(term)):
        return opaque, opaque
    # `inner` is always a multiple of 1 / denominator
    denominator = math.lcm(*(c.denominator for c in to_terms(inner).values()))
    slack = sympy.Rational(denominator - 1, denominator)
    low, high = (inner - slack, inner) if isinstance(rounded[0], sympy.floor) else (inner, inner + slack)
    return _shifted(low * rest), _shifted(high * rest)


def _is_power(factor: sympy.Expr) -> bool:
    base, exponent = factor.as_base_exp()
    return bool(factor.is_Number or (base.is_Symbol and exponent.is_Integer and exponent.is_positive))


def _shifted(polynomial: sympy.Expr) -> Terms:
    """Substitute s = 1 + t, writing t as the same, here non-negative, symbol."""
    shift = {s: sympy.Symbol(s.name, nonnegative=True, integer=True) + 1 for s in polynomial.free_symbols}
    return to_terms(sympy.expand(sympy.sympify(polynomial).subs(shift, simultaneous=True)))


def _without_combinations(forms: Sequence[Terms], bounds: Mapping[sympy.Expr, Bounds]) -> list[Terms]:
    """Drop each form that lies under a convex combination of the others: it is never alone at the top."""
    kept = list(forms)
    for form in reversed(forms):
        others = [f for f in kept if f is not form]
        if len(others) >= 2 and _lies_under(form, others, bounds):
            kept = others
    return kept


def _lies_under(form: Terms, others: Sequence[Terms], bounds: Mapping[sympy.Expr, Bounds]) -> bool:
    """Search weights by a linear program in floats; believe them only after an exact check."""
    columns = [_lower(add_terms(other, {m: -c for m, c in form.items()}), bounds) for other in others]
    rows = list({m: None for column in columns for m in column})
    matrix = np.array([[float(column.get(m, 0)) for column in columns] for m in rows])
    matrix /= np.abs(matrix).max(axis=1, keepdims=True)
    slack = np.ones((len(rows), 1))  # the largest one leaves room for rounding the weights
    result = linprog(
        [*([0.0] * len(others)), -1.0],
        A_ub=np.hstack([-matrix, slack]),
        b_ub=np.zeros(len(rows)),
        A_eq=[[*([1.0] * len(others)), 0.0]],
        b_eq=[1.0],
        method="highs",
    )
    if result.x is None:
        return False
    weights = [max(Fraction(0), Fraction(float(w)).limit_denominator(10**6)) for w in result.x[:-1]]
    total = sum(weights, Fraction(0))
    weighted = zip(weights, others, strict=True)
    combined = add_terms({}, *({m: c * w / total for m, c in other.items()} for w, other in weighted))
    return _dominates(combined, form, bounds)


def _lower(form: Terms, bounds: Mapping[sympy.Expr, Bounds]) -> Terms:
    return add_terms(
        {}, *({key: c * factor for key, factor in bounds[m][0 if c > 0 else 1].items()} for m, c in form.items())
    )
