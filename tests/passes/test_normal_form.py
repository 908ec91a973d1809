"""Losses as sums over counts: the same values and gradients, and counts that no part has to wait for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxmem.analysis.split_families.call import Call
from fxmem.analysis.split_families.losses import MEAN
from fxmem.capture import JointGraph, capture
from fxmem.passes.normal_form import LossNormalForm
from fxmem.testing import check_pass
from fxmem.testing.random_graphs import joint_args

aten = torch.ops.aten
NUM_CLASSES = 5
Case = tuple[Callable[..., Tensor], dict[str, Tensor]]


class Losses(nn.Module):
    """The loss of the i-th argument by the i-th function, which is told the tensors that it needs by keyword."""

    def __init__(self, cases: list[Case]) -> None:
        super().__init__()
        self.losses = [loss for loss, _ in cases]
        self.tensors = nn.ModuleList(nn.Module() for _ in cases)
        for holder, (_, tensors) in zip(self.tensors, cases, strict=True):
            for name, tensor in tensors.items():
                holder.register_buffer(name, tensor.clone())  # two buffers that are one tensor would have one name
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            loss(x * self.scale, **dict(holder.named_buffers()))
            for loss, holder, x in zip(self.losses, self.tensors, inputs, strict=True)
        )


def captured(cases: list[Case], inputs: list[Tensor]) -> tuple[JointGraph, tuple[Any, ...]]:
    """The joint graph of all losses, each of an input of its own, with arguments; tangents are random."""
    module = Losses(cases)
    inputs = [x.clone().requires_grad_() for x in inputs]
    (joint,) = capture(module, inputs, frontend="aot")
    return joint, joint_args(joint, module, inputs)


def labels(*shape: int) -> Tensor:
    return torch.randint(NUM_CLASSES, shape)


WEIGHT = torch.rand(NUM_CLASSES) + 0.5
CROSS_ENTROPIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weight": WEIGHT},
    "classes of no weight": {"weight": torch.zeros(NUM_CLASSES)},
    "smoothed": {"label_smoothing": 0.2},
    "weighted and smoothed": {"weight": WEIGHT, "label_smoothing": 0.2},
    "a class ignored": {"ignore_index": 2},
    "a class ignored and weighted": {"ignore_index": 2, "weight": WEIGHT},
    "sum": {"reduction": "sum"},
    "weighted sum": {"reduction": "sum", "weight": WEIGHT},
    "none": {"reduction": "none"},
    "smoothed none": {"reduction": "none", "label_smoothing": 0.2},
}


def cross_entropy(target: Tensor, weight: Tensor | None = None, **options: Any) -> Case:
    tensors = {"target": target} | ({"weight": weight} if weight is not None else {})
    return partial(F.cross_entropy, **options), tensors


@pytest.fixture(scope="module", params=[(8,), (2, 2, 2)])
def cross_entropies(request: pytest.FixtureRequest) -> tuple[JointGraph, tuple[Any, ...]]:
    """All of CROSS_ENTROPIES on labels of one shape."""
    shape: tuple[int, ...] = request.param
    cases = [cross_entropy(labels(*shape), **options) for options in CROSS_ENTROPIES.values()]
    return captured(cases, [torch.randn(shape[0], NUM_CLASSES, *shape[1:]) for _ in cases])


@pytest.mark.parametrize("num_ignored", [0, 3, 8])
def test_cross_entropy_is_what_it_was(cross_entropies: tuple[JointGraph, tuple[Any, ...]], num_ignored: int) -> None:
    joint, args = cross_entropies
    ignored = iter(options.get("ignore_index", -100) for options in CROSS_ENTROPIES.values())
    args = tuple(with_ignored(a, num_ignored, next(ignored)) if a.dtype == torch.int64 else a for a in args)
    made = check_pass(LossNormalForm(), joint, args, tolerance=1e-6)
    assert_no_means(made.graph)
    assert_counts_need_labels_only(made.graph)
    assert bool(made(*args)[0].isnan()) == (num_ignored == 8), "0 / 0"


def with_ignored(target: Tensor, count: int, ignore_index: int) -> Tensor:
    target = target.clone()
    target.view(-1)[:count] = ignore_index
    return target


@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_scores_of_one_sample_are_a_batch_of_none(weight: Tensor | None) -> None:
    case = cross_entropy(torch.tensor(3), weight)
    made = check_pass(LossNormalForm(), *captured([case], [torch.randn(NUM_CLASSES)]), tolerance=1e-6)
    assert_no_means(made.graph)


TARGET = {"y": torch.rand(4, 6)}
ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda x, y: F.mse_loss(x, y),
    "mse sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "l1": lambda x, y: F.l1_loss(x, y),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.3),
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.3),
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sub(0.5).sign()),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "bce weighted": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y, weight=y[0]),
    "bce logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "bce logits weighted": lambda x, y: F.binary_cross_entropy_with_logits(x, y, y, pos_weight=y[1]),
    "kl": lambda x, y: F.kl_div(x.log_softmax(-1), y, reduction="batchmean"),
    "class probabilities": lambda x, y: F.cross_entropy(x, y),
    "mean": lambda x, y: x.square().mean(),
    "mean of rows": lambda x, y: x.square().mean(0).sum(),
    "mean of all dims": lambda x, y: x.square().mean((0, 1), keepdim=True).sum(),
    "mean in another precision": lambda x, y: x.square().mean(dtype=torch.float64).float(),
}
ELEMENTWISE_CASES: list[Case] = [(loss, TARGET) for loss in ELEMENTWISE.values()]


def test_elementwise_losses_and_means_are_what_they_were() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 6) for _ in ELEMENTWISE]
    made = check_pass(LossNormalForm(), *captured(ELEMENTWISE_CASES, inputs), tolerance=1e-5)
    assert_no_means(made.graph)


def test_a_second_pass_has_nothing_to_do() -> None:
    cases = [cross_entropy(labels(8), reduction=how) for how in ("mean", "sum", "none")]
    inputs = [torch.randn(8, NUM_CLASSES)] * 3 + [torch.randn(4, 6)] * len(ELEMENTWISE)
    joint, _ = captured(cases + ELEMENTWISE_CASES, inputs)
    made = LossNormalForm().apply(joint)
    assert made is not joint
    assert LossNormalForm().apply(made) is made


def test_what_is_no_mean_over_rows_stays() -> None:
    cases: list[Case] = [(lambda x: x.square().mean(-1), {}), (lambda x: F.layer_norm(x, (6,)).sum(), {})]
    joint, _ = captured(cases, [torch.randn(4, 6)] * 2)
    assert LossNormalForm().apply(joint) is joint


def test_sums_of_half_precision_would_overflow() -> None:
    cases: list[Case] = [(lambda x, y: F.mse_loss(x, y.half()), TARGET), (lambda x: x.mean(), {})]
    joint, _ = captured(cases, [torch.randn(4, 6).half()] * 2)
    assert LossNormalForm().apply(joint) is joint


def test_bfloat16_keeps_its_precision() -> None:
    cases = [cross_entropy(with_ignored(labels(300), 7, -100)), (lambda x: x.square().mean(), {})]
    joint, args = captured(cases, [torch.randn(300, NUM_CLASSES).bfloat16()] * 2)
    check_pass(LossNormalForm(), joint, args, tolerance=2**-6)


def test_counts_that_are_symbols_stay_and_those_of_labels_do_not() -> None:
    model = nn.Linear(6, NUM_CLASSES)

    def step(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        scores = model(x)
        return F.cross_entropy(scores, target), scores.square().mean()

    (joint,) = capture(step, (torch.randn(8, 6), labels(8)), dynamic=True)
    targets = [node.target for node in LossNormalForm().apply(joint).nodes]
    assert aten.ne.Scalar in targets
    assert aten.mean.default in targets


def test_new_nodes_keep_the_model_line_and_the_region() -> None:
    model = nn.Linear(6, NUM_CLASSES)
    (joint,) = capture(lambda x, y: F.cross_entropy(model(x), y), (torch.randn(8, 6), labels(8)))
    made = LossNormalForm().apply(joint)
    nodes = made.nodes
    assert made.tangents == joint.tangents
    assert [n.name for n in nodes[made.num_forward_nodes :]][:1] == list(joint.tangents)
    for node in nodes:
        if node.target in (aten.ne.Scalar, aten.div.Tensor, aten.nll_loss_forward.default):
            assert "cross_entropy" in made.sources[node.name]


def assert_no_means(graph: fx.Graph) -> None:
    for node in graph.nodes:
        arguments = Call(node).arguments if hasattr(node.target, "_schema") else {}
        assert arguments.get("reduction") != MEAN, node.format_node()
        assert node.target is not aten.mean.default, node.format_node()


def assert_counts_need_labels_only(graph: fx.Graph) -> None:
    """What backward divides by, and the total weight that it is told, are computed without any scores."""
    totals = [
        n.args[6] for n in graph.nodes if n.target in (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
    ]
    assert len(totals) == len(CROSS_ENTROPIES)
    for total in totals:
        assert not any(n.target is aten._log_softmax.default for n in ancestors(total)), total.format_node()


def ancestors(node: fx.Node) -> set[fx.Node]:
    found, pending = set(), [node]
    while pending:
        found.add(last := pending.pop())
        pending += [n for n in last.all_input_nodes if n not in found]
    return found
