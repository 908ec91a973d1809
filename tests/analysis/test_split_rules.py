"""Every split rule against execution: whole against parts, along every way that it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem import compat
from fxmem.analysis.split_families.combinators import broadcasting
from fxmem.analysis.split_rules import RULES, rule_of, ways
from tests.analysis.split_cases import CASES, CUDA_CASES, Case, Draw
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
