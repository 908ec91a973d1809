"""FX graphs, the values of their nodes, and nested structures of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _BoxedCodeGen
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fxmem.compat.tensors import storage_key

BoxedCodeGen = _BoxedCodeGen


def recompiled(module: fx.GraphModule) -> Callable[..., Any]:
    """The module's generated forward, now and not at its first call, which would keep the call's arguments alive."""
    module.recompile()
    if isinstance(module, _LazyGraphModule):
        _LazyGraphModule.force_recompile(module)
    return module.forward


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors among the fake values of `node`."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def storage_keys(node: fx.Node) -> frozenset[int]:
    """Identities of the storages that the fake values of `node` live in."""
    return frozenset(map(storage_key, tensors_of(node)))


def flatten(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Leaves of a nested structure, and what builds the same structure from other leaves."""
    leaves, spec = tree_flatten(tree)
    return leaves, lambda new: tree_unflatten(new, spec)


def flatten_with_spec(tree: Any) -> tuple[list[Any], Callable[[list[Any]], Any], Any]:
    """As `flatten`, and the structure as something that can be compared and hashed."""
    leaves, spec = tree_flatten(tree)
    return leaves, lambda new: tree_unflatten(new, spec), repr(spec)
