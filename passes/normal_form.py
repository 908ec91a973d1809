"""`LossNormalForm`: losses that are means become sums divided by their count, so that they can be computed in parts.

A mean of parts' means is not the mean of all where labels are ignored, so averages are not what parts can hand on. The
count of a cross entropy is made of the labels (and the weights of classes) alone: no part has to wait for another one's
scores. A division stays one: where all labels are ignored, 0 / 0 is NaN as before.

Sums of float16 may overflow where their mean would not: such losses are left as they are, and so are those of which the
number of elements is a symbol.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxmem.analysis.split_families.call import Call, Size
from fxmem.analysis.split_families.losses import MEAN, SUM
from fxmem.capture import JointGraph
from fxmem.passes.base import GraphPass
from fxmem.passes.part_graph import VIEWS, PartGraph

aten = torch.ops.aten
_DERIVED = VIEWS | {operator.getitem}


@dataclass(frozen=True)
class LossNormalForm(GraphPass):
    """Cross entropy, the elementwise losses and means over the outermost dim become sums over counts.

    Results differ from the mean's by rounding. What the backward of a cross entropy reads of its forward is made of
    labels alone, also where the loss was a sum.
    """

    name: ClassVar[str] = "loss_normal_form"

    def apply(self, joint: JointGraph) -> JointGraph:
        return normal_form(joint)


def normal_form(joint: JointGraph) -> JointGraph:
    """The graph with sums in place of mean losses; `joint` itself if it has none."""
    if all(_rewriting(node) is None for node in joint.nodes):
        return joint
    rewriter = Rewriter(joint)
    for node in rewriter.nodes.walk():
        rewriter.emit(node)
    return rewriter.finish()


class Rewriter:
    """`values`: what stands for a captured node in the new graph; `items`: for the results of one, if not itself."""

    def __init__(self, joint: JointGraph) -> None:
        self.joint, self.nodes = joint, PartGraph(joint)
        self.values: dict[fx.Node, fx.Node] = {}
        self.items: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def emit(self, node: fx.Node) -> None:
        """Copy `node`, or write what takes its place."""
        rewriting = _rewriting(node)
        if rewriting is not None:
            rewriting(self, Call(node))
        elif node.target is operator.getitem and node.args[0] in self.items:
            self.values[node] = self.items[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            self.values[node] = self.nodes.copy(node, self.values.__getitem__)

    def new(self, argument: Any) -> Any:
        """What an argument of the old graph is in the new one."""
        return fx.map_arg(argument, self.values.__getitem__)

    def call(self, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call in the place of `source`, on nodes of the new graph."""
        return self.nodes.call(target, args, None, source, kwargs)

    def finish(self) -> JointGraph:
        results = self.new(self.joint.outputs)
        self._drop_unread(set(results))
        return self.nodes.finish(results)

    def _drop_unread(self, results: Collection[Any]) -> None:
        """Picks and views that were read, and are read no more: the total weight of a sum, a view of a view."""
        sources = {new: old for old, new in reversed(self.values.items())}
        for new, old in sources.items():
            if new.target in _DERIVED and old.users and not new.users and new not in results:
                self.nodes.graph.erase_node(new)


def _rewrite_cross_entropy(rewriter: Rewriter, call: Call) -> None:
    """Sum of the losses / total weight of the labels; who asks for the total weight gets this one."""
    total = _total_weight(rewriter, call)
    scores, target, weight = (rewriter.new(call[name]) for name in ("self", "target", "weight"))
    node: Any = call.node
    results = rewriter.call(node, node.target, scores, target, weight, SUM, call["ignore_index"])
    summed = rewriter.call(node, operator.getitem, results, 0)
    rewriter.items[node] = (rewriter.call(node, aten.div.Tensor, summed, total), total)


def _total_weight(rewriter: Rewriter, call: Call) -> fx.Node:
    """Number of labels that are not ignored, or the sum of their classes' weights; of the losses' dtype."""
    node, target, weight = call.node, rewriter.new(call["target"]), rewriter.new(call["weight"])
    if weight is None:
        counted = rewriter.call(node, aten.ne.Scalar, target, call["ignore_index"])
        count = rewriter.call(node, aten.sum.default, counted)
        return rewriter.call(node, aten._to_copy.default, count, dtype=call.results[0].dtype)
    ignored = rewriter.call(node, aten.eq.Scalar, target, call["ignore_index"])
    classes = rewriter.call(node, aten.masked_fill.Scalar, target, ignored, 0)
    weights = rewriter.call(node, aten.index.Tensor, weight, [classes])
    counted = rewriter.call(node, aten.masked_fill.Scalar, weights, ignored, 0)
    return rewriter.call(node, aten.sum.default, counted)


def _rewrite_cross_entropy_backward(rewriter: Rewriter, call: Call) -> None:
    """Of a mean, that of the sum with the gradient divided. Backward of a sum is told a total that it doesn't read."""
    node: Any = call.node
    names = ("grad_output", "self", "target", "weight", "total_weight")
    gradient, scores, target, weight, total = (rewriter.new(call[name]) for name in names)
    reduction = call["reduction"]
    if reduction == MEAN:
        gradient = rewriter.call(node, aten.div.Tensor, gradient, total)
        reduction = SUM
    else:
        options = {"dtype": call.results[0].dtype, "device": call.results[0].device}
        total = rewriter.call(node, aten.full.default, [], 1, **options)
    arguments = (gradient, scores, target, weight, reduction, call["ignore_index"], total)
    rewriter.values[node] = rewriter.call(node, node.target, *arguments)


def _rewrite_elementwise(rewriter: Rewriter, call: Call) -> None:
    shape = torch.broadcast_shapes(call.shape_of("self"), call.shape_of("target"))
    summed = rewriter.call(call.node, call.node.target, *_arguments(rewriter, call, reduction=SUM))
    rewriter.values[call.node] = rewriter.call(call.node, aten.div.Scalar, summed, math.prod(shape))


def _rewrite_elementwise_backward(rewriter: Rewriter, call: Call) -> None:
    node, count = call.node, math.prod(call.shape_of("self"))
    gradient = rewriter.call(node, aten.div.Scalar, rewriter.new(call["grad_output"]), count)
    arguments = _arguments(rewriter, call, reduction=SUM, grad_output=gradient)
    rewriter.values[node] = rewriter.call(node, node.target, *arguments)


def _arguments(rewriter: Rewriter, call: Call, **changed: Any) -> list[Any]:
    """All arguments of a call by position, some of them changed."""
    return [changed.get(name, rewriter.new(value)) for name, value in call.arguments.items()]


def _rewrite_mean(rewriter: Rewriter, call: Call) -> None:
    node, dims = call.node, call.dims()
    options = {"dtype": call["dtype"]} if call["dtype"] is not None else {}
    if "dim" in call.arguments:
        arguments = (rewriter.new(call["self"]), call["dim"], call["keepdim"])
        summed = rewriter.call(node, aten.sum.dim_IntList, *arguments, **options)
    else:
        summed = rewriter.call(node, aten.sum.default, rewriter.new(call["self"]), **options)
    count = math.prod(call.shape_of("self")[d] for d in dims)
    rewriter.values[node] = rewriter.call(node, aten.div.Scalar, summed, count)


def _is_mean(call: Call) -> bool:
    return call["reduction"] == MEAN and _can_be_summed(call)


def _is_known_mean(call: Call) -> bool:
    return _is_mean(call) and _is_known((*call.shape_of("self"), *call.shape_of("target")))


def _reads_forward(call: Call) -> bool:
    """Is the total weight that of the forward op?"""
    origin = getattr(call["total_weight"], "target", None)
    return origin is operator.getitem and (_can_be_summed(call) or call["reduction"] != MEAN)


def _averages_rows(call: Call) -> bool:
    return 0 in call.dims() and _can_be_summed(call) and _is_known(call.shape_of("self"))


def _can_be_summed(call: Call) -> bool:
    return call.results[0].dtype in (torch.float32, torch.float64, torch.bfloat16)


def _is_known(shape: Sequence[Size]) -> bool:
    return all(isinstance(size, int) for size in shape)


_Rewriting = Callable[[Rewriter, Call], None]
_REWRITINGS: dict[Any, tuple[Callable[[Call], bool], _Rewriting]] = {
    **dict.fromkeys(
        (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
        (_is_mean, _rewrite_cross_entropy),
    ),
    **dict.fromkeys(
        (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default),
        (_reads_forward, _rewrite_cross_entropy_backward),
    ),
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.soft_margin_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
        ),
        (_is_known_mean, _rewrite_elementwise),
    ),
    **dict.fromkeys(
        (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.soft_margin_loss_backward.default,
            aten.binary_cross_entropy_backward.default,
        ),
        (_is_known_mean, _rewrite_elementwise_backward),
    ),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), (_averages_rows, _rewrite_mean)),
}
"""Op -> where it applies, and what is written in its place."""


def _rewriting(node: fx.Node) -> _Rewriting | None:
    applies, rewriting = _REWRITINGS.get(node.target, (None, None))
    return rewriting if applies is not None and applies(Call(node)) else None
