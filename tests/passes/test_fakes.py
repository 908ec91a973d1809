"""Fake values laid out like those of a call before are what running the op gives."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from split_steps import Step
from torch import Tensor, fx
from zoo import build

from fxmem import compat
from fxmem.passes.fakes import Fakes, fake_result

aten = torch.ops.aten


def look(value: Any, args: list[Tensor]) -> Any:
    """All that is told of a fake value: its layout, where it lies, and what it shares its storage with."""
    if isinstance(value, (tuple, list)):
        return [look(item, args) for item in value]
    if not isinstance(value, Tensor):
        return value
    shares = [compat.storage_key(value) == compat.storage_key(arg) for arg in args]
    layout = tuple(value.shape), value.stride(), value.dtype, value.device, value.storage_offset()
    return layout, compat.storage_nbytes(value), shares


def verify_fakes(graph: fx.Graph) -> int:
    """Every node's value is that which its op makes of what it reads; the number of those looked at."""
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    mode = compat.fake_mode_of(graph.nodes)
    for node in nodes:
        args = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor)]
        assert look(node.meta["val"], args) == look(fake_result(node.target, node, mode), args), node.format_node()
    return len(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "unet"])
def test_parts_have_the_values_that_their_ops_make(model: str) -> None:
    module, args = build(model, "tiny")
    step = Step(module, args)
    split = step.split(step.whole(2))
    assert verify_fakes(split.graph_module.graph) > len(step.joint.nodes)


def fakes(*shapes: tuple[int, ...]) -> tuple[fx.Graph, list[fx.Node], Fakes]:
    mode, graph = compat.FakeTensorMode(), fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(shapes))]
    with mode:
        for node, shape in zip(nodes, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
    return graph, nodes, Fakes(mode)


def call(graph: fx.Graph, made: Fakes, target: Any, *args: Any) -> Tensor:
    node = graph.call_function(target, args)
    node.meta["val"] = value = made.of(node)
    assert look(value, []) == look(fake_result(target, node, compat.fake_mode_of(graph.nodes)), [])
    return value


def test_arguments_that_compare_equal_are_not_the_same() -> None:
    graph, (x,), made = fakes((2, 3))
    numbers = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.int64})
    numbers.meta["val"] = made.of(numbers)
    kinds = [call(graph, made, aten.mul.Tensor, numbers, factor).dtype for factor in (1, 1.0, True)]
    assert kinds == [torch.int64, torch.float32, torch.int64]


def test_which_argument_is_shared_is_not_taken_from_a_call_in_which_two_are_one() -> None:
    graph, (x, y), made = fakes((2, 3), (2, 3))
    base, other = x.meta["val"], y.meta["val"]
    assert call(graph, made, aten.add_.Tensor, x, x) is base
    assert call(graph, made, aten.add_.Tensor, y, x) is other
    assert call(graph, made, aten.add_.Tensor, x, y) is base
    for node in (x, y):
        assert compat.storage_key(call(graph, made, aten.t.default, node)) == compat.storage_key(node.meta["val"])


def test_slices_and_strided_views_lie_where_they_should() -> None:
    graph, (x,), made = fakes((6, 4))
    for target, args in (
        (aten.slice.Tensor, (0, 2, 5)),
        (aten.slice.Tensor, (0, -2, 2**63 - 1)),
        (aten.slice.Tensor, (0, 4, 2)),
        (aten.slice.Tensor, (1, 0, 4, 2)),
        (aten.slice.Tensor, ()),
        (aten.as_strided.default, ([2, 2], [4, 1], 3)),
        (aten.as_strided.default, ([2, 2], [4, 1])),
    ):
        value = call(graph, made, target, x, *args)
        assert compat.storage_key(value) == compat.storage_key(x.meta["val"])


def test_sizes_that_are_known_only_at_run_time_are_asked_for_each_time() -> None:
    graph, (x,), made = fakes((6, 4))
    node = graph.call_function(aten.sum.default, (x,))
    assert made.of(node) is not made.of(node)
    values = [graph.call_function(aten.nonzero.default, (x,)) for _ in range(2)]
    with compat.FakeTensorMode() as mode:
        x.meta["val"] = torch.empty(6, 4)
    assert isinstance(mode, compat.FakeTensorMode)
    for value in values:
        with pytest.raises(Exception, match="nonzero"):
            Fakes(mode).of(value)
