"""Every split rule against execution: whole against parts, along every way that it gives."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem import compat
from fxmem.analysis.split_families.combinators import broadcasting
from fxmem.analysis.split_rules import RULES, Way, part_call, rule_of, tensor_args, ways
from tests.analysis.split_cases import CASES
from tests.analysis.split_cases.draw import Case, Draw
from tests.analysis.split_cases.normalisation import CUDA_CASES
from tests.analysis.split_parts import call_node, check_way

aten = torch.ops.aten


def overload(op: Any) -> compat.OpOverload:
    found: compat.OpOverload = op if isinstance(op, compat.OpOverload) else op.default
    return found


def check(op: compat.OpOverload, args: tuple[Any, ...]) -> int:
    """Run the call whole and along all its ways; returns how many parts ran. The last argument may hold keywords."""
    *args, last = args
    kwargs = last if isinstance(last, dict) else {}
    node, values, whole = call_node(op, tuple(args) if isinstance(last, dict) else (*args, last), kwargs)
    return sum(check_way(node, way, values, whole, is_dense) for way in ways(node) for is_dense in (False, True))


def examples(num_examples: int) -> Callable[[Any], Any]:
    """So many examples of a rule, more in the thorough profile."""
    return settings(max_examples=num_examples * settings.default.max_examples // 100)


@pytest.mark.parametrize("op", CASES, ids=str)
def test_parts_make_the_whole(op: Any) -> None:
    run_case(op, CASES[op], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("op", CUDA_CASES, ids=str)
def test_parts_make_the_whole_on_cuda(op: Any) -> None:
    run_case(op, CUDA_CASES[op], "cuda")


def run_case(op: Any, case: Case, device: str) -> None:
    num_parts = 0

    @examples(5)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal num_parts
        with torch.device(device):
            num_parts += check(overload(op), case(Draw(data)))

    run()
    assert num_parts > 0, f"no way of {op} was run"


def pointwise_ops() -> Iterator[compat.OpOverload]:
    """Every functional op of ATen that has the rule of pointwise ops, and no case of its own."""
    own = {overload(op) for op in CASES}
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        for op in (getattr(packet, o) for o in getattr(packet, "overloads", list)()):
            is_random = torch.Tag.nondeterministic_seeded in op.tags
            is_tensor = any("Tensor" in str(result.type) for result in op._schema.returns)
            if rule_of(op) is broadcasting and op not in own and is_tensor and not (op._schema.is_mutable or is_random):
                yield op


POINTWISE = list(pointwise_ops())


@examples(3)
@given(st.data())
def test_parts_of_pointwise_ops_make_the_whole(data: st.DataObject) -> None:
    draw = Draw(data)
    shape = draw.shape(2, 3)
    others = [shape, draw.broadcast(shape), draw.broadcast(shape), draw.broadcast(shape)]
    num_parts = Counter({op: check(op, pointwise_arguments(op, others)) for op in POINTWISE})
    assert len(num_parts) > 250
    assert [op for op, count in num_parts.items() if not count and max(shape) > 1] == []


def pointwise_arguments(op: compat.OpOverload, shapes: list[tuple[int, ...]]) -> tuple[Any, ...]:
    """Arguments by the op's schema, of the first dtype that it takes; broadcast where it broadcasts."""
    for dtype in (torch.float64, torch.int64, torch.bool):
        for broadcast in (shapes, shapes[:1] * len(shapes)):
            args, kwargs = _by_schema(op, iter(broadcast), dtype)
            try:
                op(*args, **kwargs)
            except RuntimeError:
                continue
            return *args, kwargs
    raise AssertionError(f"no arguments found for {op._schema}")


def _by_schema(
    op: compat.OpOverload, shapes: Iterator[tuple[int, ...]], dtype: torch.dtype
) -> tuple[list[Any], dict[str, Any]]:
    numbers: dict[str, Any] = {"number": 2, "Optional[number]": 2, "int": 1, "float": 0.5, "bool": True}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            is_mask = argument.name in ("condition", "mask")
            value = torch.randn(next(shapes)).mul(3).to(torch.bool if is_mask else dtype)
        else:
            value = numbers.get(kind) if argument.default_value is None else argument.default_value
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def test_every_rule_has_a_case() -> None:
    cases = {*CASES, *CUDA_CASES, *POINTWISE, *(op.overloadpacket for op in POINTWISE)}
    assert [str(op) for op in RULES if op not in cases] == []


def test_packets_have_one_rule_for_overloads_that_have_one_case() -> None:
    """A packet in the table stands for all of its overloads: each is run, or is no functional op of its own."""
    for packet in (op for op in RULES if not isinstance(op, compat.OpOverload) and RULES[op] is not broadcasting):
        others = [o for o in packet.overloads() if o != "default" and not getattr(packet, o)._schema.is_mutable]
        assert others == [], packet


def ways_of(op: compat.OpOverload, *args: Any, **kwargs: Any) -> tuple[Way, ...]:
    return ways(call_node(op, args, kwargs)[0])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.native_dropout.default, (torch.ones(4, 4), 0.5, True)),
        (aten.bernoulli.default, (torch.ones(4, 4) / 2,)),
        (aten.rand_like.default, (torch.ones(4, 4),)),
        (aten.add_.Tensor, (torch.ones(4, 4), 1)),
        (aten.copy_.default, (torch.ones(4, 4), torch.ones(4, 4))),
        (aten.mean.default, (torch.ones(4, 4),)),
        (aten.mse_loss.default, (torch.ones(4, 4), torch.ones(4, 4))),
        (aten.mse_loss_backward.default, (torch.ones(()), torch.ones(4, 4), torch.ones(4, 4), 1)),
        (aten.nll_loss_forward.default, (torch.ones(4, 3), torch.ones(4).long(), None, 1, -100)),
        (aten.embedding_dense_backward.default, (torch.ones(4, 3), torch.ones(4).long(), 3, -1, True)),
        (aten.index.Tensor, (torch.ones(4, 4), [torch.ones(4, 4) > 0])),
        (aten.arange.default, (4,)),
        (aten.nonzero.default, (torch.ones(4, 4),)),
        (aten.equal.default, (torch.ones(4, 4), torch.ones(4, 4))),
        (aten.squeeze.default, (torch.ones(4, 1, 4),)),
        (aten.mul.Tensor, (torch.ones(4, 4).to_sparse(), 2)),
        (aten.roll.default, (torch.ones(4, 4), [1])),
        (aten.add.Tensor, (torch.ones(1, 1), torch.ones(()))),
    ],
    ids=lambda value: str(value) if isinstance(value, compat.OpOverload) else "",
)
def test_boundaries(op: compat.OpOverload, args: tuple[Any, ...]) -> None:
    """Random and written tensors, what depends on all elements or their places, unknown sizes, single elements."""
    assert ways_of(op, *args) == ()


def test_inputs_that_are_one_tensor_are_split_alike() -> None:
    square = torch.ones(4, 4)
    assert ways_of(aten.mul.Tensor, square, square) == (Way((0,), (0,)), Way((1,), (1,)))
    assert ways_of(aten.mm.default, square, square) == ()
    assert Way((0, None), (0,)) in ways_of(aten.mm.default, square, torch.ones(4, 4))


def test_what_is_contracted_is_summed_unless_something_is_added() -> None:
    a, b, bias = torch.ones(4, 3), torch.ones(3, 2), torch.ones(2)
    assert Way((1, 0), ("sum",)) in ways_of(aten.mm.default, a, b)
    assert [way.outputs for way in ways_of(aten.addmm.default, bias, a, b)] == [(0,), (1,)]
    assert Way((0,), ("sum",)) in ways_of(aten.sum.dim_IntList, a, [0])
    assert ways_of(aten.amax.default, a, [0]) == (Way((1,), (0,)),)


def test_the_way_of_merged_dims_is_that_of_the_outermost() -> None:
    (rows, columns) = ways_of(aten.view.default, torch.ones(2, 1, 3, 4), [6, 4])
    assert (rows.inputs, rows.outputs, columns.inputs, columns.outputs) == ((0,), (0,), (3,), (1,))
    (back, _) = ways_of(aten.view.default, torch.ones(6, 4), [2, 3, 4])
    assert (back.inputs, back.outputs) == ((0,), (0,))


def test_none_along_the_dims_that_belong_together() -> None:
    x = torch.ones(2, 3, 4)
    assert {d for way in ways_of(aten._softmax.default, x, -1, False) for d in way.inputs} == {0, 1}
    assert {d for way in ways_of(aten.cumsum.default, x, -1) for d in way.inputs} == {0, 1}
    assert {way.inputs[0] for way in ways_of(aten.native_layer_norm.default, x, [3, 4], None, None, 1e-5)} == {0}
    batch_norm = aten._native_batch_norm_legit_functional.default
    vectors = [torch.ones(3)] * 4
    assert {way.inputs[0] for way in ways_of(batch_norm, x, *vectors, True, 0.1, 1e-5)} == {1}


def test_statistics_of_a_layer_norm_are_not_handed_over_with_gaps() -> None:
    """The CPU's kernel takes mean and rstd for contiguous: slices along an inner dim give wrong gradients."""
    x, weight, statistics = torch.ones(2, 3, 4), torch.ones(4), torch.ones(2, 3, 1)
    args = (x, x.clone(), [4], statistics, statistics.clone(), weight, weight.clone(), [True] * 3)
    assert [way.inputs for way in ways_of(aten.native_layer_norm_backward.default, *args)] == [(0,) * 4 + (None,) * 2]


def test_heads_that_share_a_key_are_not_split_apart() -> None:
    query, key, value = (torch.ones(2, heads, 3, 4) for heads in (4, 4, 4))
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    args = (query, query + 0, key, value, query + 0, torch.ones(2, 4, 3), 0.0, False)
    node, _, _ = call_node(op, args, {})
    assert {way.inputs[0] for way in ways(node)} == {0, 1, 2}
    node, _, _ = call_node(op, args, {})
    for shared in (node.args[2], node.args[3]):
        shared.meta["val"] = torch.ones(2, 1, 3, 4)
    node.meta["val"] = (query, torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
    assert {way.inputs[0] for way in ways(node)} == {0, 2}


def test_sizes_of_parts() -> None:
    def half(size: int) -> int:
        return size // 2

    node, _, _ = call_node(aten.view.default, (torch.ones(4, 6), [4, 2, 3]), {})
    assert part_call(node, ways(node)[0], half)[0][1] == [2, 2, 3]
    node, _, _ = call_node(aten.view.default, (torch.ones(4, 6), [-1, 2, 3]), {})
    assert part_call(node, ways(node)[0], half)[0][1] == [-1, 2, 3]
    node, _, _ = call_node(aten.new_full.default, (torch.ones(1),), {"size": [4, 2], "fill_value": 1})
    args, kwargs = part_call(node, ways(node)[0], half)
    assert args == tuple(tensor_args(node))
    assert kwargs == {"size": [2, 2], "fill_value": 1}


def test_items_of_results_are_split_along_any_dim() -> None:
    node, _, whole = call_node(aten.split.Tensor, (torch.ones(4, 1, 6), 3, 2), {})
    item = node.graph.call_function(operator.getitem, (node, 0))
    item.meta["val"] = whole[0]
    assert ways(item) == (Way((), (0,)), Way((), (2,)))


@pytest.mark.parametrize("op", [aten.mm.default, aten.sum.dim_IntList, aten.native_layer_norm_backward], ids=str)
def test_sums_in_bfloat16(op: Any) -> None:
    @examples(5)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        check(overload(op), CASES[op](Draw(data, torch.bfloat16)))

    run()
