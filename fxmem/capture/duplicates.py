"""Merge ops that compute the same from the same arguments (index tables, masks): no plan should pay for them twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.effects import is_collective, is_pure, is_random
from fxmem.capture.overwritten import written_args


def merge_duplicates(graph: fx.Graph) -> None:
    """Let readers of a repeated op read its first run. `graph`: functional, but for updates of inputs at its end.

    What is returned is left alone, so that no two results become one tensor. A view of what went is a view of another
    storage now: its fake value is made again.
    """
    first: dict[Any, fx.Node] = {}
    gone: dict[int, torch.Tensor] = {}  # storage -> a tensor of it, which keeps the storage's identity taken
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if any(compat.storage_key(t) in gone for t in _tensors(node)):
            _make_value_again(node)
        if not _may_merge(node):
            continue
        key = (node.target, _frozen((node.args, node.kwargs)))
        original = first.setdefault(key, node)
        if original is not node:
            gone |= {compat.storage_key(t): t for t in _tensors(node)}
            node.replace_all_uses_with(original)
            graph.erase_node(node)


def _may_merge(node: fx.Node) -> bool:
    """Pure, owns what it returns, and nobody outside or in place touches the result."""
    if is_random(node) or is_collective(node) or not is_pure(node) or written_args(node):
        return False
    return not any(user.op == "output" or node in written_args(user) for user in node.users)


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [t for t in compat.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]


def _make_value_again(node: fx.Node) -> None:
    """Run a view on the fake value that its base has now."""
    values = [t.fake_mode for t in _tensors(node) if isinstance(t, compat.FakeTensor)]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with values[0]:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _frozen(value: Any) -> Any:
    """`value` with its containers hashable; types told apart, since 1 == 1.0 == True."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in sorted(value.items()))
    return value if isinstance(value, fx.Node) else (type(value), str(value))
