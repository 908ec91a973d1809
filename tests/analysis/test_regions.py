"""What belongs to a region, what stands at its border, in which order it runs, and why some are refused."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from split_steps import Step
from torch import Tensor, nn
from zoo import build

from fxmem.analysis.linear import ZERO, degrees
from fxmem.analysis.region import Loop
from fxmem.analysis.regions import Fission

aten = torch.ops.aten


class Network(nn.Module):
    """A layer, what `middle` makes of it, cross entropy."""

    def __init__(self, middle: nn.Module, width: int) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, width), middle, nn.Linear(width, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.last(self.middle(self.first(x))), labels)


@functools.cache
def network(kind: type[nn.Module] = nn.Tanh, *args: int, width: int = 16) -> Step:
    torch.manual_seed(0)
    return Step(Network(kind(*args), width), (torch.randn(12, 8), torch.randint(32, (12,))))


def test_a_whole_step_is_one_loop_in_each_direction_and_only_sums_leave_it() -> None:
    step = network()
    region = step.region(step.whole(3))
    assert not region.refused
    assert [sum(isinstance(item, Loop) for item in items) for items in (region.forward, region.backward)] == [1, 1]
    assert {region.dims[tensor] for tensor in region.whole} == {"sum"}
    assert region.blocked == ()
    assert region.inside_bytes > 12 * 64 * 4


def test_the_number_of_labels_is_counted_before_and_no_part_waits_for_it() -> None:
    step = network()
    region = step.region(step.whole(3, fuse=True))
    assert region.num_levels == 1
    (loop,) = (item for item in region.forward if isinstance(item, Loop))
    counts = [n for n in step.joint.nodes if n.target is aten.ne.Scalar]
    assert counts
    assert not set(counts) & set(loop.members)
    assert region.forward.index(counts[0]) < region.forward.index(loop)


def test_small_values_are_sliced_not_drawn_in() -> None:
    step = network()
    loss, whole = step.region(step.loss(3)), step.region(step.whole(3))
    assert set(loss.members) < set(whole.members)
    assert not any(n.target is aten.tanh.default for n in loss.members)
    assert any(n.target is aten.tanh.default for n in whole.members)


def test_gradients_in_forward_leave_only_scaling_for_backward() -> None:
    step = network()
    region = step.region(step.whole(3, fuse=True))
    assert region.tangent is not None
    assert region.tangent.name in step.joint.tangents
    assert region.scaled
    assert {region.dims[tensor] for tensor in region.scaled} == {"sum"}
    assert not any(isinstance(item, Loop) for item in region.backward)
    assert step.region(step.whole(3)).scaled == frozenset()


class Centred(nn.Module):
    """Subtracts the batch's mean: every row waits for all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x - x.sum(0) / 12)


def test_what_needs_all_parts_is_of_the_next_level() -> None:
    step = network(Centred, width=128)
    region = step.region(step.whole(3))
    first, second = (n for n in region.members if n.target is aten.addmm.default)
    assert region.levels[first] < region.levels[second]
    forward = [item for item in region.forward if isinstance(item, Loop)]
    assert [first in forward[0].members, second in forward[1].members] == [True, True]
    step.assert_same(step.whole(3))
    step.assert_same(step.whole(3, fuse=True), tangent=2.0)


def test_batch_norm_is_named_with_the_models_line() -> None:
    step = network(nn.BatchNorm1d, 16)
    first = next(i for i, n in enumerate(step.joint.nodes) if n.target is aten.addmm.default)
    region = step.region(Fission(first, 0, (0, 6, 12)))
    assert "batch_norm" in region.refused
    assert "self.middle(self.first(x))" in region.refused


@pytest.mark.slow
def test_resnet_is_left_alone() -> None:
    step = Step(*build("resnet50"))
    assert "batch_norm" in step.region(step.whole(2)).refused
    assert "self.normalization" in step.region(step.whole(2)).refused


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offsets": (0, 12)}, "not the borders of several parts"),
        ({"offsets": (0, 5, 5, 12)}, "not the borders of several parts"),
        ({"offsets": (0, 5, 13)}, "not the borders of several parts"),
        ({"dim": 7}, "has no dimension 7"),
        ({"seed": 10_000}, "no tensor at index 10000"),
    ],
)
def test_seeds_that_say_nothing_are_refused(change: dict[str, object], reason: str) -> None:
    step = network()
    assert reason in step.region(replace(step.whole(3), **change)).refused  # type: ignore[arg-type]


def test_dims_that_borders_do_not_fall_between_stay_whole() -> None:
    torch.manual_seed(0)
    step = Step(Rows(), (torch.randn(3, 4, 8), torch.randint(32, (12,))))
    seed = step.largest(aten.addmm.default)
    assert not step.region(Fission(seed, 0, (0, 4, 12))).refused
    assert (
        step.region(Fission(seed, 0, (0, 4, 12))).members.keys()
        > step.region(Fission(seed, 0, (0, 5, 12))).members.keys()
    )


class Rows(nn.Module):
    """Linear over (B, S), a product with each batch's own mean, cross entropy over all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 32)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.last(x)
        scores = scores * scores.mean(1, keepdim=True)
        return F.cross_entropy(scores.flatten(0, 1), labels)


class Vector(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 2) * x


def test_gradients_that_are_no_multiple_of_one_number_stay_in_backward() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    step = Step(Vector(), (x,))
    seed = step.largest(aten.tanh.default)
    assert not step.region(Fission(seed, 0, (0, 3, 6))).refused
    assert "not a multiple of one number" in step.region(Fission(seed, 0, (0, 3, 6), fuse=True)).refused


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class Clipped(nn.Module):
    """Its backward clamps the gradient: not linear in it."""

    def forward(self, x: Tensor) -> Tensor:
        return _Clipped.apply(torch.tanh(x))  # type: ignore[no-any-return]


def test_gradients_that_are_clipped_stay_in_backward() -> None:
    step = network(Clipped)
    assert "not known to be proportional" in step.region(step.whole(3, fuse=True)).refused
    step.assert_same(step.whole(3))


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.half()).float()


def test_gradients_in_float16_stay_in_backward() -> None:
    step = network(Half)
    assert "float16" in step.region(step.whole(3, fuse=True)).refused


def test_degrees_in_the_incoming_gradient() -> None:
    graph = torch.fx.Graph()
    x, tangent = (graph.placeholder(name) for name in ("x", "tangents_1"))
    linear = graph.call_function(aten.mul.Tensor, (tangent, x))
    squared = graph.call_function(aten.mul.Tensor, (linear, tangent))
    divided = graph.call_function(aten.div.Tensor, (squared, linear))
    zeros = graph.call_function(aten.zeros_like.default, (linear,))
    masked = graph.call_function(aten.where.self, (graph.call_function(aten.gt.Scalar, (x, 0)), linear, zeros))
    shifted = graph.call_function(aten.add.Tensor, (linear, 1.0))
    mixed = graph.call_function(aten.add.Tensor, (linear, x))
    tanh = graph.call_function(aten.tanh_backward.default, (linear, x))
    wrong = graph.call_function(aten.tanh_backward.default, (x, linear))
    for node in graph.nodes:
        is_mask = node.target is aten.gt.Scalar
        node.meta["val"] = torch.zeros(3, dtype=torch.bool if is_mask else torch.float32)
    found = degrees(graph.nodes, tangent)
    assert [found[n] for n in (x, tangent, linear, squared, zeros, masked, tanh)] == [0, 1, 1, 2, ZERO, 1, 1]
    assert [found[n] for n in (divided, shifted, mixed, wrong)] == [None] * 4


def test_integers_are_selectors_only_where_they_select_and_are_no_multiples_of_a_gradient() -> None:
    graph = torch.fx.Graph()
    labels, x, tangent = (graph.placeholder(name) for name in ("labels", "x", "tangents_1"))
    zero = graph.call_function(aten.full.default, ([3], 0))
    kept = graph.call_function(aten.where.self, (graph.call_function(aten.gt.Scalar, (labels, 0)), labels, zero))
    equal = graph.call_function(aten.eq.Tensor, (zero, labels))
    taken = graph.call_function(aten.gather.default, (tangent, 0, labels))
    rounded = graph.call_function(aten._to_copy.default, (tangent,), {"dtype": torch.int64})
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(3, dtype=torch.int64)
    for node in (x, tangent, taken):
        node.meta["val"] = torch.zeros(3)
    found = degrees(graph.nodes, tangent)
    assert [found[n] for n in (zero, kept, equal, taken, rounded)] == [ZERO, 0, 0, 1, None]
