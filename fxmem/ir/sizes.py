"""Symbolic sizes: plain sympy over positive integer symbols, and a JSON form that is data, never parsed as code."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import sympy

from fxmem.errors import VerifyError

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (sympy.Add, sympy.Mul, sympy.Pow, sympy.Max, sympy.Min, sympy.Mod, sympy.floor, sympy.ceiling)
}
# torch's own shape functions, in plain sympy
_TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "FloorDiv": lambda a, b: sympy.floor(a / b),
    "CleanDiv": lambda a, b: sympy.floor(a / b),
    "CeilDiv": lambda a, b: sympy.ceiling(a / b),
    "IntTrueDiv": lambda a, b: a / b,
    "PythonMod": sympy.Mod,
    "Mod": sympy.Mod,
    "ModularIndexing": lambda a, b, m: sympy.Mod(sympy.floor(a / b), m),
    "Max": sympy.Max,
    "Min": sympy.Min,
}


def symbol(name: str) -> sympy.Symbol:
    """A size symbol: a positive integer."""
    return sympy.Symbol(name, positive=True, integer=True)


def plain(expr: Any) -> int | sympy.Expr:
    """`expr` (int, sympy, or torch's sympy) in plain sympy over our symbols; an int when it is a constant."""
    if isinstance(expr, (int, sympy.Integer)):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        return symbol(expr.name)
    if isinstance(expr, sympy.Rational):
        return expr
    args = [plain(arg) for arg in expr.args]
    name = expr.func.__name__
    function = _TORCH_FUNCTIONS.get(name) or _FUNCTIONS.get(name)
    if function is None:
        raise VerifyError(f"a size uses an unknown function: {expr}")
    result = function(*map(sympy.sympify, args))
    return int(result) if isinstance(result, sympy.Integer) else result


def evaluate(size: int | sympy.Expr, values: Mapping[str, int]) -> int:
    """Bytes with symbols set to `values`.

    Raises VerifyError when a symbol has no value (sizes are never guessed), or no sensible number comes out.
    """
    if isinstance(size, int):
        return size
    missing = sorted(s.name for s in size.free_symbols if s.name not in values)
    if missing:
        raise VerifyError(f"size {size} depends on unknown symbols {', '.join(missing)}")
    try:
        return math.floor(_number(size, values))
    except ArithmeticError as error:
        raise VerifyError(f"a size can't be evaluated ({error})") from error


def _number(expr: sympy.Expr, values: Mapping[str, int]) -> Fraction:
    """By our own arithmetic: exact, and nothing is expanded or solved on the way. Raises ArithmeticError."""
    if isinstance(expr, sympy.Symbol):
        return Fraction(values[expr.name])
    if isinstance(expr, sympy.Rational):
        return Fraction(int(expr.p), int(expr.q))
    function = _NUMBERS.get(expr.func.__name__)
    if function is None:
        raise VerifyError(f"a size uses an unknown function: {expr.func.__name__}")
    result = Fraction(function(*(_number(arg, values) for arg in expr.args)))
    if result.numerator.bit_length() > _MAX_BITS or result.denominator.bit_length() > _MAX_BITS:
        raise OverflowError("a number of too many digits")
    return result


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _MAX_POWER:
        raise ArithmeticError(f"a power of {exponent}")
    return Fraction(base**exponent.numerator)


_MAX_BITS = 256
_MAX_POWER = 64
_MAX_PARTS = 5000  # of a size in a file; those of captured graphs have dozens
_NUMBERS: dict[str, Callable[..., Any]] = {
    "Add": lambda *terms: sum(terms),
    "Mul": lambda *factors: math.prod(factors),
    "Pow": _power,
    "Max": max,
    "Min": min,
    "Mod": lambda a, b: a % b,
    "floor": math.floor,
    "ceiling": math.ceil,
}


def to_json(size: int | sympy.Expr) -> Any:
    """int -> int; symbol -> its name; function -> [name, *arguments]; rational -> ["Rational", p, q]."""
    if isinstance(size, (int, sympy.Integer)):
        return int(size)
    if isinstance(size, sympy.Symbol):
        return size.name
    if isinstance(size, sympy.Rational):
        return ["Rational", int(size.p), int(size.q)]
    return [size.func.__name__, *(to_json(arg) for arg in size.args)]


def from_json(data: Any) -> int | sympy.Expr:
    """Inverse of `to_json`. Nothing is simplified, which could take forever: it was before it was written.

    Raises VerifyError for whatever `to_json` does not write.
    """
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    if isinstance(data, str):
        return symbol(data)
    if _num_parts(data) > _MAX_PARTS:
        raise VerifyError("a size of too many parts")
    return _function_from_json(data)


def _function_from_json(data: Any) -> sympy.Expr:
    if not isinstance(data, list) or len(data) < 2 or not isinstance(data[0], str):
        raise VerifyError(f"a size is {str(data)[:60]}, not a number, a symbol or [function, *arguments]")
    name, *args = data
    if name == "Rational":
        if len(args) != 2 or not all(type(arg) is int for arg in args) or not args[1]:
            raise VerifyError(f"not a fraction in a size: {str(args)[:60]}")
        return sympy.Rational(*args)
    if name not in _FUNCTIONS or len(args) not in _NUM_ARGS.get(name, range(1, _MAX_PARTS)):
        raise VerifyError(f"unknown size function {name[:60]!r}, or of {len(args)} arguments")
    return _FUNCTIONS[name](*(sympy.sympify(_part(arg)) for arg in args), evaluate=False)


_NUM_ARGS = {"Pow": (2,), "Mod": (2,), "floor": (1,), "ceiling": (1,)}


def _part(data: Any) -> int | sympy.Expr:
    return _function_from_json(data) if isinstance(data, list) else from_json(data)


def _num_parts(data: Any) -> int:
    return sum(map(_num_parts, data)) if isinstance(data, list) else 1
