"""Symbolic sizes: plain sympy over positive integer symbols, and a JSON form that is data, never parsed as code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """Bytes with symbols set to `values`. Raises VerifyError when a symbol has no value: sizes are never guessed."""
    if isinstance(size, int):
        return size
    missing = sorted(s.name for s in size.free_symbols if s.name not in values)
    if missing:
        raise VerifyError(f"size {size} depends on unknown symbols {', '.join(missing)}")
    return int(size.subs({s: values[s.name] for s in size.free_symbols}))


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
    """Inverse of `to_json`."""
    if isinstance(data, int):
        return data
    if isinstance(data, str):
        return symbol(data)
    name, *args = data
    if name == "Rational":
        return sympy.Rational(*args)
    if name not in _FUNCTIONS:
        raise VerifyError(f"unknown size function {name!r}")
    return _FUNCTIONS[name](*(sympy.sympify(from_json(arg)) for arg in args))
