"""How often the incoming gradient multiplies each value of backward: what is linear in it can be scaled afterwards.

A vector-Jacobian product is linear in its vector, but a backward pass as written need not be (a gradient that is
clamped in it, or divided by its own norm), and part of it does not depend on the gradient at all. So degrees are
derived op by op; an op that is not known here, and depends on the gradient, has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from fxmem import compat

Degree = int | None
"""Times the gradient multiplies a value; None: not known to be a product with it."""
ZERO = -1
"""Degree of a value that is zero all over: it counts as a multiple of anything."""

# fmt: off
_LINEAR = frozenset([
    "_to_copy", "_unsafe_index", "_unsafe_index_put", "_unsafe_view", "add", "alias", "as_strided", "cat", "clone",
    "constant_pad_nd", "contiguous", "copy", "cumsum", "detach", "diagonal", "expand", "flip", "gather", "index",
    "index_add", "index_put", "index_select", "masked_fill", "mean", "movedim", "neg", "permute", "repeat",
    "reshape", "roll", "scatter_add", "select", "slice", "split", "split_with_sizes", "squeeze", "stack", "sub",
    "sum", "t", "transpose", "tril", "triu", "unbind", "unfold", "unsqueeze", "view", "where",
])
# fmt: on
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "dot", "matmul", "mm", "mul", "mv"})
_ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})
_FILLED = frozenset({"full", "full_like", "new_full", "scalar_tensor"})
_VALUES = ("fill_value", "s", "value")
_GRADIENTS = ("grad", "grad_out", "grad_output", "gradOutput")
_SELECTORS = frozenset({"condition", "index", "indices", "mask"})


def degrees(nodes: Iterable[fx.Node], *tangents: fx.Node, degree: int = 1) -> dict[fx.Node, Degree]:
    """Degree of each of `nodes` (in execution order) in `tangents`, which are of `degree` themselves."""
    found: dict[fx.Node, Degree] = {}
    for node in nodes:
        found[node] = degree if node in tangents else _degree(node, found)
    return found


def _degree(node: fx.Node, known: Mapping[fx.Node, Degree]) -> Degree:
    name = _name(node)
    if name in _ZEROS or (name in _FILLED and _number(node, _VALUES) == 0):
        return ZERO
    inputs = {n: known.get(n, 0) for n in node.all_input_nodes if compat.tensors_of(n)}
    if not inputs or all(degree == 0 for degree in inputs.values()):
        return 0
    if None in inputs.values():
        return None
    degree = _combined(node, name, {n: degree for n, degree in inputs.items() if degree is not None})
    if all(d in (0, ZERO) for d in inputs.values()):
        return 0 if degree is None else degree
    return degree if _is_continuous(node) else None


def _combined(node: fx.Node, name: str, inputs: Mapping[fx.Node, int]) -> Degree:
    if name == "getitem":
        return next(iter(inputs.values()))
    if name in _PRODUCTS:
        return _of_product(node, inputs)
    if name == "div" and node.kwargs.get("rounding_mode") is None:
        by = _of(node.args[1], inputs)
        return _of(node.args[0], inputs) if by == 0 else None
    if "backward" in name:
        return _of_backward(node, inputs)
    if name in _LINEAR and not any(_number(node, (key,)) for key in ("value", "other")):
        selectors = _selectors(node)
        return _common(degree for n, degree in inputs.items() if n not in selectors)
    return None


def _of_product(node: fx.Node, inputs: Mapping[fx.Node, int]) -> Degree:
    factors = [_of(a, inputs) for a in node.args[-2:]]
    degree = ZERO if ZERO in factors else sum(factors)
    return degree if len(node.args) == 2 else _common([_of(node.args[0], inputs), degree])


def _of_backward(node: fx.Node, inputs: Mapping[fx.Node, int]) -> Degree:
    """The derivative of an op, by the names of the schema: a multiple of the gradient that comes in, and of no more."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    gradients = {node.args[i] for i, a in enumerate(arguments) if a.name in _GRADIENTS and i < len(node.args)}
    others = [degree for n, degree in inputs.items() if n not in gradients]
    is_linear = len(gradients) == 1 and all(degree in (0, ZERO) for degree in others)
    return _common(degree for n, degree in inputs.items() if n in gradients) if is_linear else None


def _common(degrees: Iterable[int]) -> Degree:
    found = {degree for degree in degrees if degree != ZERO}
    return found.pop() if len(found) == 1 else None if found else ZERO


def _of(argument: Any, inputs: Mapping[fx.Node, int]) -> int:
    return inputs[argument] if isinstance(argument, fx.Node) and argument in inputs else 0


def _selectors(node: fx.Node) -> set[fx.Node]:
    """Arguments that only say which elements are taken: indices, masks; not those that give elements as well."""
    schema = getattr(getattr(node.target, "_schema", None), "arguments", ())
    named = {argument.name: value for argument, value in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    selecting = [value for name, value in named.items() if name in _SELECTORS]
    giving = [value for name, value in named.items() if name not in _SELECTORS]
    return set(_nodes(selecting)) - set(_nodes(giving))


def _nodes(values: Any) -> list[fx.Node]:
    return [leaf for leaf in compat.tree_leaves(values) if isinstance(leaf, fx.Node)]


def _number(node: fx.Node, names: tuple[str, ...]) -> Any:
    """The number that the call gives to one of the schema's arguments `names`; 0 if it is a tensor, or left out."""
    for position, argument in enumerate(getattr(getattr(node.target, "_schema", None), "arguments", ())):
        if argument.name in names:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return 0 if value is None or isinstance(value, fx.Node) else value
    return 0


def _name(node: fx.Node) -> str:
    if isinstance(node.target, compat.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return getattr(node.target, "__name__", str(node.target))


def _is_continuous(node: fx.Node) -> bool:
    """Is no result rounded to an integer, or to true and false?"""
    return all(value.is_floating_point() or value.is_complex() for value in compat.tensors_of(node))
