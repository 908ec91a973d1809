"""`x[mask] = value` without the rows' number, which only running would tell: `torch.where`, where that says the same.

The derivative by `value` gathers the rows that the mask chose. A value that is the same for every row needs no gather.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx


def masked_writes_by_where(module: fx.GraphModule) -> None:
    """Rewrite, in Dynamo's graph `module` and those inside it, writes of one trained value to all rows of a mask."""
    for inner in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in inner.graph.find_nodes(op="call_function", target=operator.setitem):
            _rewrite(inner.graph, node)


def _rewrite(graph: fx.Graph, node: fx.Node) -> None:
    if not all(isinstance(arg, fx.Node) for arg in node.args):
        return
    target, mask, value = node.args
    assert isinstance(target, fx.Node)
    assert isinstance(mask, fx.Node)
    assert isinstance(value, fx.Node)
    into, rows, written = (arg.meta.get("example_value") for arg in (target, mask, value))
    if not (isinstance(into, Tensor) and isinstance(rows, Tensor) and isinstance(written, Tensor)):
        return
    num_dims = into.dim() - rows.dim()  # of one row
    if rows.dtype != torch.bool or num_dims < 0 or not written.requires_grad:
        return
    is_one_row = written.dim() == num_dims + 1 and isinstance(written.shape[0], int) and written.shape[0] == 1
    if written.dim() > num_dims and not is_one_row:
        return
    with graph.inserting_before(node):
        row = graph.call_method("squeeze", (value, 0)) if is_one_row else value
        condition = mask
        for _ in range(num_dims):
            condition = graph.call_method("unsqueeze", (condition, -1))
        merged = graph.call_function(torch.where, (condition, row, target))
        stored = graph.call_method("copy_", (target, merged))
    for made in (condition, merged, stored):
        made.meta.update(node.meta)
    node.replace_all_uses_with(stored)
    graph.erase_node(node)
