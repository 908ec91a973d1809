"""Split rules on captured joint graphs: how much of a model they know, and every call of it whole against parts."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxmem import compat
from fxmem.analysis.split_rules import ways
from fxmem.capture import JointGraph, capture
from fxmem.passes.normal_form import LossNormalForm
from fxmem.testing.random_graphs import joint_args
from tests.analysis.split_parts import check_way
from tests.zoo import NAMES, build

aten = torch.ops.aten
FAST = ("mlp",)
VIEWS = (aten.view.default, aten._unsafe_view.default)


class PartChecker(fx.Interpreter):
    """Runs a graph and each call of it in parts as well, before anything overwrites what it read; alike calls once."""

    def __init__(self, joint: JointGraph) -> None:
        super().__init__(joint.graph_module)
        self.seen: set[Any] = set()
        self.num_parts = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and n.target is not operator.getitem:
            key = (n.target, *shapes(fx.map_arg((n.args, n.kwargs), self.env.__getitem__)))
            if key not in self.seen:
                self.seen.add(key)
                self.num_parts += sum(check_way(n, way, self.env, result) for way in ways(n))
        return result


def shapes(arguments: Any) -> Iterator[Any]:
    """What makes calls of one op alike: shapes, strides and dtypes of tensors; other arguments as text."""
    for leaf in compat.tree_leaves(arguments):
        yield (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf)


def check(joint: JointGraph, args: tuple[Any, ...]) -> PartChecker:
    checker = PartChecker(joint)
    with torch.no_grad():
        checker.run(*args, enable_io_processing=False)
    return checker


def coverage(joint: JointGraph) -> float:
    """Share of calls that can be split somehow."""
    calls = [node for node in joint.nodes if node.op == "call_function"]
    return sum(bool(ways(node)) for node in calls) / len(calls)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_calls_of_a_model_can_be_split_and_parts_make_the_whole(name: str) -> None:
    module, args = build(name)
    (joint,) = capture(module, args)
    joint = LossNormalForm().apply(joint)
    checker = check(joint, joint_args(joint, module, args))
    assert checker.num_parts > len(checker.seen)
    random_or_written = {"gpt2_dropout": 0.94, "resnet50": 0.8}
    assert coverage(joint) > random_or_written.get(name, 0.96)


class Attention(nn.Module):
    """A block of attention with a loss, whose views name the sizes of batch and sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.project(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        scores = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        scores = scores.transpose(1, 2).reshape(batch * length, 8)
        return F.cross_entropy(scores, target.reshape(batch * length))


@pytest.mark.slow
def test_symbolic_sizes_are_compared_but_not_guarded_on() -> None:
    (joint,) = capture(Attention(), (torch.randn(6, 3, 8), torch.randint(8, (6, 3))), dynamic=True)
    joint = LossNormalForm().apply(joint)
    values = [node.meta["val"] for node in joint.nodes]
    shape_env = next(value.fake_mode.shape_env for value in values if isinstance(value, compat.FakeTensor))
    num_guards = len(shape_env.guards)
    views = [n for n in joint.nodes if n.target in VIEWS and isinstance(n.meta["val"].shape[0], torch.SymInt)]
    assert len(views) > 10
    assert all(0 in {dim for way in ways(n) for dim in way.inputs} for n in views), "along the batch"
    placeholders = [n.meta["val"] for n in joint.nodes if n.op == "placeholder"]
    assert check(joint, tuple(map(real, placeholders))).num_parts > 0
    assert len(shape_env.guards) == num_guards


def real(value: Any) -> Any:
    """Something of a fake value's shape."""
    if not isinstance(value, Tensor):
        return compat.hint(value)
    shape = [compat.hint(size) for size in value.shape]
    return torch.randn(shape) if value.dtype.is_floating_point else torch.zeros(shape, dtype=value.dtype)
