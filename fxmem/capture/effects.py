"""Effects of an op, by its own schema and tags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fxmem import compat

_COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem"}
)
_CONTROL_FLOW = frozenset(
    {
        "associative_scan",
        "cond",
        "flex_attention",
        "flex_attention_backward",
        "scan",
        "while_loop",
        "while_loop_stack_output",
    }
)


def is_random(node: fx.Node) -> bool:
    """Does the op draw random numbers, by its own tag?

    An op that is told to drop nothing (its schema has a probability of dropout, and that is zero) draws none.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not any(_argument(node, name) == 0.0 for name in ("dropout_p",))


def is_collective(node: fx.Node) -> bool:
    """Does the op talk to other processes, so that all of them must run it equally often?"""
    return getattr(node.target, "namespace", None) in _COLLECTIVE_NAMESPACES


def is_pure(node: fx.Node) -> bool:
    """Is running the op twice known to be harmless? Other ops without a schema than control flow may do anything."""
    if node.op != "call_function":
        return True
    if isinstance(node.target, compat.OpOverload):
        return torch.Tag.maybe_aliasing_or_mutating not in node.target.tags
    if isinstance(node.target, compat.HigherOrderOperator):
        return node.target.name() in _CONTROL_FLOW and all(map(_has_no_effect, _inner_nodes(node)))
    return getattr(node.target, "__module__", "") in ("_operator", "math", "torch", "builtins")


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes of the graphs that control flow takes as arguments, nested ones included."""
    graphs = [n.meta.get("val") for n in node.all_input_nodes]
    for module in {m for graph in graphs if isinstance(graph, fx.GraphModule) for m in graph.modules()}:
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


def _has_no_effect(node: fx.Node) -> bool:
    """For nodes inside of control flow, whose own nested graphs `_inner_nodes` goes through."""
    schema = getattr(node.target, "_schema", None)
    is_control_flow = isinstance(node.target, compat.HigherOrderOperator) and node.target.name() in _CONTROL_FLOW
    is_mutable = schema is not None and schema.is_mutable
    return (is_control_flow or is_pure(node)) and not (is_mutable or is_random(node) or is_collective(node))


def _argument(node: fx.Node, name: str) -> Any:
    """The value that the call gives to the schema's argument `name`; its default; None if there is no such argument."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None
