"""Rows cut off before a cross entropy: the same loss and gradients with their labels ignored, and no slices left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.capture import JointGraph, capture
from fxmem.passes.direct_views import DirectViews
from fxmem.passes.ignored_rows import IgnoredRows
from fxmem.testing import check_pass
from fxmem.testing.random_graphs import joint_args

aten = torch.ops.aten
CLASSES = 5
Cut = Callable[[Tensor], Tensor]


class Shifted(nn.Module):
    """Cross entropy of what `cut` leaves of scores (3, 4, 5); `report` adds another use of something on the way."""

    def __init__(self, cut: Cut, report: Cut | None = None, **options: Any) -> None:
        super().__init__()
        self.head = nn.Linear(6, CLASSES)
        self.cut, self.report, self.options = cut, report, options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        left = self.cut(self.head(x)).flatten(0, -2)
        loss = F.cross_entropy(left, labels, **self.options)
        return loss if self.report is None else loss + self.report(left)


def captured(cut: Cut, report: Cut | None = None, **options: Any) -> tuple[JointGraph, tuple[Any, ...]]:
    torch.manual_seed(0)
    module, x = Shifted(cut, report, **options), torch.randn(3, 4, 6)
    num_rows = cut(x).flatten(0, -2).shape[0]
    labels = torch.arange(num_rows) % CLASSES
    (joint,) = capture(module, (x, labels), frontend="aot")
    return joint, joint_args(joint, module, (x, labels))


def targets(joint: JointGraph) -> set[Any]:
    return {node.target for node in joint.nodes}


CUTS: dict[str, Cut] = {
    "last position": lambda x: x[:, :-1],
    "first position": lambda x: x[:, 1:],
    "middle": lambda x: x[:, 1:3],
    "both dims": lambda x: x[1:, :-2],
    "rows": lambda x: x.flatten(0, 1)[2:-3],
    "in another dtype": lambda x: x[:, :-1].double(),
    "of a copy": lambda x: x.transpose(0, 1)[:, :-1],
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 2}, {"reduction": "sum"}, {"weight": torch.linspace(0.1, 0.9, CLASSES)}],
    ids=["mean", "ignore_index", "sum", "weight"],
)
def test_the_loss_and_all_gradients_are_what_they_were(cut: Cut, options: dict[str, Any]) -> None:
    if "weight" in options and cut(torch.zeros(3, 4, 5)).dtype is torch.float64:
        options = {"weight": options["weight"].double()}
    joint, args = captured(cut, **options)
    made = IgnoredRows().apply(joint)
    assert aten.slice_backward.default in targets(joint)
    assert not {aten.slice.Tensor, aten.slice_backward.default} & targets(made)
    check_pass(IgnoredRows(), joint, args, tolerance=1e-6)
    assert IgnoredRows().apply(made) is made


@pytest.mark.parametrize(
    ("cut", "report", "options"),
    [
        (lambda x: x[:, ::2], None, {}),
        (lambda x: x[:, :, 1:], None, {}),
        (lambda x: x, None, {}),
        (lambda x: x[:, :-1], None, {"reduction": "none"}),
        (lambda x: x[:, :-1], None, {"label_smoothing": 0.1}),
        (lambda x: x[:, :-1], lambda left: left.exp().sum(), {}),
        (lambda x: x[:, :-1], lambda left: left.log_softmax(-1).max(), {}),
    ],
)
def test_what_others_read_is_left_alone(cut: Cut, report: Cut | None, options: dict[str, Any]) -> None:
    joint, _ = captured(cut, report, **options)
    assert IgnoredRows().apply(joint) is joint


def test_views_of_views_are_views_of_what_is_beneath() -> None:
    def views(x: Tensor) -> Tensor:
        return x.view(12, -1).view(2, 6, -1).view(12, -1).exp().view(4, 3, -1).transpose(0, 1)

    joint, args = captured(views)
    made = check_pass(DirectViews(), joint, args, tolerance=0.0).graph.nodes
    nested = [n for n in made if n.target is aten.view.default and n.args[0].target is aten.view.default]
    assert not nested
    assert len(made) < len(joint.nodes)


def test_a_result_that_is_a_view_stays_one() -> None:
    class Module(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = (x * 2).view(12)
            return flat.sum(), flat.view(3, 4)

    x = torch.randn(3, 4, requires_grad=True)
    (joint,) = capture(Module(), (x,), frontend="aot")
    check_pass(DirectViews(), joint, joint_args(joint, Module(), (x,)), tolerance=0.0)
