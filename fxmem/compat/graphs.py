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


def module_of_graph(root: torch.nn.Module, graph: fx.Graph, class_name: str = "GraphModule") -> fx.GraphModule:
    """A GraphModule whose code is generated when it is first asked for: of most graphs nobody runs or prints it."""
    return _LazyGraphModule(root, graph, class_name=class_name)


def recompiled(module: fx.GraphModule) -> Callable[..., Any]:
    """The module's generated forward, now and not at its first call, which would keep the call's arguments alive."""
    module.recompile()
    if isinstance(module, _LazyGraphModule):
        _LazyGraphModule.force_recompile(module)
    return module.forward


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The tensors among the fake values of `node`."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):  # nearly always: flattening takes ten times as long
        return [found]
    return [value for value in tree_leaves(found) if isinstance(value, torch.Tensor)]


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
