"""Which ops can run part by part, and how: a table from ATen op to rule. No rule: the op is a boundary, no error.

Two promises hold for every way (tests execute them): parts along it give the whole result, concatenated along a dim or
added up; added up are only linear contractions. A value whose size along its dim is D may be split at the offset o of
a seed of N iff D * o is divisible by N, so merged dims are split along the outermost one of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxmem import compat
from fxmem.analysis.per_node import per_node
from fxmem.analysis.split_families import (
    contractions,
    elementwise,
    images,
    indexing,
    losses,
    normalisation,
    reductions,
    views,
)
from fxmem.analysis.split_families.call import Call, Output, Rule, Way, open_dims, tensor_args
from fxmem.analysis.split_families.combinators import broadcasting
from fxmem.capture.effects import is_collective, is_random

__all__ = ["RULES", "Output", "Way", "part_call", "rule_of", "tensor_args", "ways"]

RULES: dict[Any, Rule] = {
    **elementwise.RULES,
    **views.RULES,
    **contractions.RULES,
    **reductions.RULES,
    **normalisation.RULES,
    **images.RULES,
    **indexing.RULES,
    **losses.RULES,
}
"""Op (one overload, or a packet of them) -> how it is split. Ops that call themselves pointwise need no line."""


def rule_of(target: Any) -> Rule | None:
    """The rule of an op, if there is one."""
    if not isinstance(target, compat.OpOverload):
        return None
    rule = RULES.get(target) or RULES.get(target.overloadpacket)
    return broadcasting if rule is None and elementwise.is_pointwise(target) else rule


@per_node
def ways(node: fx.Node) -> tuple[Way, ...]:
    """Every way there is to run `node` part by part; none where it is a boundary.

    Boundaries are ops without a rule, random, mutating and collective ones, and where sizes can't be told. Along dims
    of size 1 there are no ways. A `getitem` has one for each dim of the tensor that it picks; its input, a tuple, is no
    tensor argument.
    """
    if node.target is operator.getitem:
        value = node.meta.get("val")
        return tuple(Way((), (d,)) for d in open_dims(value.shape)) if isinstance(value, Tensor) else ()
    rule = rule_of(node.target) if node.op == "call_function" else None
    if rule is None or not _is_plain(node):
        return ()
    return tuple(dict.fromkeys(way for way in rule(Call(node)) if way is not None))


def _is_plain(node: fx.Node) -> bool:
    """Does the call make tensors, have no effects, and are all its tensors dense?"""
    target: Any = node.target
    made, read = ([*_tensors(nodes)] for nodes in ([node], node.all_input_nodes))
    is_dense = all(tensor.layout == torch.strided for tensor in made + read)
    return bool(made) and is_dense and not (target._schema.is_mutable or is_random(node) or is_collective(node))


def _tensors(nodes: Iterable[fx.Node]) -> Iterator[Tensor]:
    leaves = (leaf for node in nodes for leaf in compat.tree_leaves(node.meta.get("val")))
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def part_call(node: fx.Node, way: Way, size: Callable[[int], int]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call on one part: sizes along split dims shrunk to `size(whole)`, nodes left as they are.

    A size that the op infers (-1) stays; one that is computed in the graph becomes inferred.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    names = [argument.name for argument in node.target._schema.arguments] if way.sizes else []  # type: ignore[union-attr]
    for name, position in way.sizes:
        place: Any = args if name not in kwargs else kwargs
        key: Any = names.index(name) if place is args else name
        place[key] = _shrunk(place[key], position, size)
    return tuple(args), kwargs


def _shrunk(value: Any, position: int | None, size: Callable[[int], int]) -> Any:
    if position is not None:
        return [_shrunk(v, None, size) if i == position else v for i, v in enumerate(value)]
    return -1 if isinstance(value, fx.Node) or value == -1 else size(value)
