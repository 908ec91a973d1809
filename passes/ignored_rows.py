"""`IgnoredRows`: rows of scores that are cut off before a cross entropy are kept, and their labels ignored.

Causal language models leave out the last position of each sequence: `cross_entropy(scores[:, :-1].flatten(0, 1), ...)`.
What is left can't be viewed as rows, so it is copied; cut off, its rows are no parts of the scores'; and the gradient
is padded with zeros in yet another tensor. With the rows kept and a label for each of them that is ignored, the loss is
the same sum of the same numbers and the gradient of those rows exactly zero (NaN, if their scores are).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxmem.analysis.split_families.call import Call
from fxmem.capture import JointGraph
from fxmem.passes.base import GraphPass
from fxmem.passes.normal_form import Rewriter
from fxmem.passes.part_graph import VIEWS

aten = torch.ops.aten
_SAME = frozenset({aten.alias.default, aten.detach.default})
_COPIED = frozenset({aten.clone.default, aten._to_copy.default})
Box = tuple[tuple[int, int], ...]
"""First and last row (exclusive) of what is left, along each dim but the last."""


@dataclass(frozen=True)
class IgnoredRows(GraphPass):
    """Keep rows that are sliced off on their way into a cross entropy, where only that reads what is left of them."""

    name: ClassVar[str] = "ignored_rows"

    def apply(self, joint: JointGraph) -> JointGraph:
        losses = [node for node in joint.nodes if node.target is aten.nll_loss_forward.default]
        found = [cut for node in losses if (cut := _cut_before(node)) is not None]
        if not found:
            return joint
        rewriter = Rewriter(joint)
        written: dict[fx.Node, _Cut] = {}
        for cut in found:
            written |= cut.nodes()
        for node in rewriter.nodes.walk():
            cut = written.get(node)
            if cut is None:
                rewriter.emit(node)
            else:
                cut.write(node, rewriter)
        return rewriter.finish()


@dataclass(frozen=True, eq=False)
class _Cut:
    """Scores (`base`) -> `above`, some of them slices -> `softmax` -> `loss`, and back: `loss_backward`,
    `softmax_backward` -> `below`, which end in the gradient of `base`. `aliases`: of the softmax."""

    base: fx.Node
    above: tuple[fx.Node, ...]
    box: Box
    softmax: fx.Node
    aliases: tuple[fx.Node, ...]
    loss: fx.Node
    loss_backward: fx.Node
    softmax_backward: fx.Node
    below: tuple[fx.Node, ...]

    def nodes(self) -> dict[fx.Node, _Cut]:
        """All that something else is written for."""
        chain = (*self.above, self.softmax, *self.aliases, self.loss, self.loss_backward, self.softmax_backward)
        return dict.fromkeys((*chain, *self.below), self)

    def write(self, node: fx.Node, rewriter: Rewriter) -> None:
        """What takes the place of `node`, one of `nodes`."""
        if node is self.softmax:
            scores = self._rows(rewriter)
            rewriter.values[node] = rewriter.call(node, node.target, scores, *node.args[1:])
        elif node in self.aliases:
            rewriter.values[node] = rewriter.values[self.softmax]
        elif node in (self.loss, self.loss_backward):
            arguments = dict(Call(node).arguments)
            labels = self._labels(node, rewriter)
            new = [labels if name == "target" else rewriter.new(value) for name, value in arguments.items()]
            rewriter.values[node] = rewriter.call(node, node.target, *new)
        elif node is self.softmax_backward:
            rewriter.values[node] = rewriter.call(node, node.target, *map(rewriter.new, node.args))
        elif node is self.below[-1]:
            self._gradient(rewriter)

    def _rows(self, rewriter: Rewriter) -> fx.Node:
        """The scores, none of them cut off, as rows."""
        scores, (*lead, classes) = rewriter.new(self.base), self.base.meta["val"].shape
        for node in self.above:
            if node.target is aten._to_copy.default:
                scores = rewriter.call(node, node.target, scores, **node.kwargs)
        if not scores.meta["val"].is_contiguous():
            scores = rewriter.call(
                self.softmax, aten.clone.default, scores, memory_format=torch.contiguous_format
            )
        return rewriter.call(self.softmax, aten.view.default, scores, [math.prod(lead), classes])

    def _labels(self, node: fx.Node, rewriter: Rewriter) -> fx.Node:
        call = Call(node)
        lead = self.base.meta["val"].shape[:-1]
        labels = rewriter.call(
            node, aten.view.default, rewriter.new(call["target"]), [end - start for start, end in self.box]
        )
        beside = [(start, size - end) for size, (start, end) in zip(lead, self.box, strict=True)]
        padding = [count for pair in reversed(beside) for count in pair]
        padded = rewriter.call(node, aten.constant_pad_nd.default, labels, padding, call["ignore_index"])
        return rewriter.call(node, aten.view.default, padded, [math.prod(lead)])

    def _gradient(self, rewriter: Rewriter) -> None:
        gradient = rewriter.values[self.softmax_backward]
        for node in self.below:
            if node.target is aten._to_copy.default:
                gradient = rewriter.call(node, node.target, gradient, **node.kwargs)
        end = self.below[-1]
        shape = list(self.base.meta["val"].shape)
        rewriter.values[end] = rewriter.call(end, aten.view.default, gradient, shape)


def _cut_before(loss: fx.Node) -> _Cut | None:
    """The cut before a cross entropy, if there is one that can be undone."""
    call = Call(loss)
    softmax = call["self"]
    is_known = all(type(size) is int for size in (*call.shape_of("self"), *call.shape_of("target")))
    if not is_known or call["reduction"] == 0 or softmax.target is not aten._log_softmax.default:
        return None
    above = _above(softmax)
    if not above:
        return None
    base: Any = above[0].args[0]
    aliases, readers = _readers(softmax)
    backward = _backward(loss, softmax, readers)
    box = _box(base, [*above, softmax])
    if backward is None or box is None:
        return None
    below = _below(backward[1], base)
    return _Cut(base, tuple(above), box, softmax, tuple(aliases), loss, *backward, tuple(below)) if below else None


def _above(softmax: fx.Node) -> list[fx.Node]:
    """The nodes from the first slice to `softmax`, in order, each read by the next one only."""
    chain: list[fx.Node] = []
    reader, node = softmax, softmax.args[0]
    allowed = _SAME | VIEWS | _COPIED | {aten.slice.Tensor}
    while isinstance(node, fx.Node) and node.target in allowed and set(node.users) == {reader}:
        chain.append(node)
        reader, node = node, node.args[0]
    while chain and chain[-1].target is not aten.slice.Tensor:
        chain.pop()
    return chain[::-1]


def _box(base: fx.Node, chain: list[fx.Node]) -> Box | None:
    """What the slices among `chain`, which ends in a softmax of rows, leave of `base`; None if not rows alone."""
    shape = tuple(base.meta["val"].shape)
    box = [(0, size) for size in shape[:-1]]
    classes, is_flat = shape[-1], False
    for node in chain:
        result = tuple(node.meta["val"].shape)
        if not all(type(size) is int for size in result) or result[-1] != classes:
            return None
        if node.target is aten.slice.Tensor:
            call = Call(node)
            dim = int(call["dim"]) % len(shape)
            if is_flat or call["step"] != 1 or dim == len(shape) - 1:
                return None
            start, end, _ = slice(call["start"], call["end"]).indices(box[dim][1] - box[dim][0])
            box[dim] = (box[dim][0] + start, box[dim][0] + max(start, end))
        lead = [end - start for start, end in box]
        is_flat = is_flat or (len(result) == 2 and len(shape) > 2)
        if result != ((math.prod(lead), classes) if is_flat else (*lead, classes)):
            return None
    return tuple(box) if len(chain[-1].meta["val"].shape) == 2 and chain[-1].args[1] in (1, -1) else None


def _readers(softmax: fx.Node) -> tuple[list[fx.Node], set[fx.Node]]:
    """(aliases of `softmax`, who reads it or one of them)."""
    aliases: list[fx.Node] = []
    readers: set[fx.Node] = set()
    for node in (todo := [softmax]):
        for user in node.users:
            if user.target in _SAME:
                aliases.append(user)
                todo.append(user)
            else:
                readers.add(user)
    return aliases, readers


def _backward(loss: fx.Node, softmax: fx.Node, readers: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """Backward of the loss and of the softmax, if they are all that reads the softmax but for the loss itself."""
    by_target: Mapping[Any, fx.Node] = {node.target: node for node in readers}
    gradient = by_target.get(aten.nll_loss_backward.default)
    result = by_target.get(aten._log_softmax_backward_data.default)
    if gradient is None or result is None or readers != {loss, gradient, result} or set(gradient.users) != {result}:
        return None
    same = Call(gradient)["target"] is Call(loss)["target"] and result.args[0] is gradient
    return (gradient, result) if same else None


def _below(gradient: fx.Node, base: fx.Node) -> list[fx.Node]:
    """The nodes that make the gradient of `base` of that of the softmax, in order; none if there is more to them."""
    chain: list[fx.Node] = []
    shape = tuple(base.meta["val"].shape)
    for node in _only_readers(gradient):
        if node.target not in _SAME | VIEWS | _COPIED | {aten.slice_backward.default}:
            return []
        chain.append(node)
        if node.target is aten.slice_backward.default and tuple(node.meta["val"].shape) == shape:
            return chain
    return []


def _only_readers(node: fx.Node) -> Iterator[fx.Node]:
    while len(node.users) == 1:
        (node,) = node.users
        yield node
