"""Runs calls whole and part by part: what the split rules promise, by execution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from fxmem import compat
from fxmem.analysis.split_rules import Way, part_call, tensor_args

UNDEFINED = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default})
UNDEFINED |= {torch.ops.aten.new_empty.default}
"""What these return is not defined, only its shape is."""


def check_way(node: fx.Node, way: Way, values: Mapping[fx.Node, Any], whole: Any, is_dense: bool = False) -> int:
    """Run `node` in ragged parts, along `way`, on `values`; the results must be `whole`. Returns how many parts ran.

    `values`: per tensor argument. `is_dense`: parts of arguments are tensors of their own, not slices. Raises
    AssertionError.
    """
    tensors = [values[n] for n in tensor_args(node)]
    results = _items(whole)
    assert len(way.inputs) == len(tensors)
    assert len(way.outputs) == len(results)
    lengths = [t.shape[d] for t, d in zip(tensors, way.inputs, strict=True) if d is not None]
    lengths += [t.shape[d] for t, d in zip(results, way.outputs, strict=True) if isinstance(d, int)]
    assert lengths, f"{way} of {node.format_node()} splits nothing"
    offsets = _offsets(math.gcd(*lengths))
    parts = [_run_part(node, way, values, (a, b, offsets[-1]), is_dense) for a, b in itertools.pairwise(offsets)]
    for i, (output, result) in enumerate(zip(way.outputs, results, strict=True)):
        if output is not None:
            _compare(node, way, output, [_items(part)[i] for part in parts], result, _largest(*tensors))
    return len(parts)


def _offsets(length: int) -> list[int]:
    """Borders of parts that are not all of one size, where there are enough elements."""
    return sorted({0, min(1, length), (length + 2) // 2, length})


def _run_part(
    node: fx.Node, way: Way, values: Mapping[fx.Node, Any], part: tuple[int, int, int], is_dense: bool
) -> Any:
    start, end, length = part

    def share(size: int) -> int:
        assert size * start % length == 0
        assert size * (end - start) % length == 0
        return size * (end - start) // length

    def part_of(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor
        size = tensor.shape[dim]
        found = tensor.narrow(dim, size * start // length, share(size))
        return found.contiguous() if is_dense else found

    parts = {n: part_of(values[n], dim) for n, dim in zip(tensor_args(node), way.inputs, strict=True)}
    args, kwargs = fx.map_arg(part_call(node, way, share), lambda n: parts[n] if n in parts else values[n])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _compare(node: fx.Node, way: Way, output: Any, parts: list[Tensor], whole: Tensor, largest_input: float) -> None:
    """What should be zero is as small as rounding makes it of what was read."""
    found = sum(parts[1:], parts[0]) if output == "sum" else torch.cat(parts, output)
    assert found.shape == whole.shape, f"{way} of {node.format_node()}: {found.shape}, whole {whole.shape}"
    assert found.dtype == whole.dtype
    if node.target not in UNDEFINED:
        rtol = _TOLERANCE.get(whole.dtype, 0.0)
        atol = rtol * max(_largest(whole), largest_input / 100)
        is_close = torch.allclose(found, whole, rtol=rtol, atol=atol, equal_nan=True)
        assert is_close, f"{way} of {node.format_node()}:\n{found}\nwhole:\n{whole}"


_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Relative to the largest element: sums are in another order."""


def _largest(*tensors: Tensor) -> float:
    """Of all finite elements."""
    sizes = [t.abs().nan_to_num(posinf=0, neginf=0).max() for t in tensors if t.numel() and t.dtype in _TOLERANCE]
    return max(map(float, sizes), default=0.0)


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def call_node(
    op: compat.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[fx.Node, dict[fx.Node, Any], Any]:
    """A node that calls `op` on placeholders (one for each tensor), their values, and what the call returns."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    values: dict[fx.Node, Any] = {}

    def placeholder(tensor: Tensor) -> fx.Node:
        if id(tensor) not in nodes:
            node = nodes[id(tensor)] = graph.placeholder(f"x{len(nodes)}")
            values[node] = node.meta["val"] = tensor
        return nodes[id(tensor)]

    node = graph.call_function(op, *compat.tree_map_only(Tensor, placeholder, (args, kwargs)))
    node.meta["val"] = whole = op(*args, **kwargs)
    return node, values, whole


def shapes(value: Any) -> Iterator[Any]:
    """What makes calls of one op alike: shapes, strides and dtypes of tensors; other arguments as text."""
    for leaf in compat.tree_leaves(value):
        yield (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf)
