"""Sizes that are symbols, and their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch

from fxmem.compat.tensors import storage_nbytes


def hint(size: int | torch.SymInt) -> int:
    """The value of a size seen at capture, without a guard on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else size


def symbol_hints(tensor: torch.Tensor) -> dict[str, int]:
    """Value at capture of every size symbol that the shape environment of a FakeTensor has seen."""
    shape_env = getattr(getattr(tensor, "fake_mode", None), "shape_env", None)
    attribute = "backed_var_to_val" if hasattr(shape_env, "backed_var_to_val") else "var_to_val"  # before torch 2.12
    values = getattr(shape_env, attribute, {})
    return {str(symbol): int(value) for symbol, value in values.items()}


def symbol_name(value: Any) -> str | None:
    """Name of the size symbol that `value` is, if it is one."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        return str(value.node.expr)
    return None


def symbol_values(example_inputs: Sequence[Any], args: Sequence[Any]) -> dict[str, int]:
    """Values that a call's `args` give to the size symbols of the graph's `example_inputs`.

    Also to those that only the storage behind an input mentions (a slice's base has rows of its own).
    """
    values: dict[str, int] = {}
    for example, arg in zip(example_inputs, args, strict=True):
        pairs = zip(example.shape, arg.shape, strict=True) if isinstance(example, torch.Tensor) else [(example, arg)]
        for size, actual in pairs:
            name = symbol_name(size)
            if name is not None:
                values[name] = int(actual)
    for example, arg in zip(example_inputs, args, strict=True):
        if isinstance(example, torch.Tensor):
            values |= _symbol_of_storage(storage_nbytes(example), int(storage_nbytes(arg)), values)
    return values


def _symbol_of_storage(nbytes: int | torch.SymInt, actual: int, values: Mapping[str, int]) -> dict[str, int]:
    """The one symbol in the size of a storage that has no value yet: the least with which it has `actual` bytes."""
    expr = sympy.sympify(nbytes.node.expr if isinstance(nbytes, torch.SymInt) else nbytes)
    expr = expr.subs({symbol: values[str(symbol)] for symbol in expr.free_symbols if str(symbol) in values})
    unknown = list(expr.free_symbols)
    if len(unknown) != 1:
        return {}
    slope, rest = expr.coeff(unknown[0], 1), expr.coeff(unknown[0], 0)
    return {str(unknown[0]): int(sympy.ceiling((actual - rest) / slope))} if slope.is_positive else {}
