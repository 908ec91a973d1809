"""The same cuts in another graph of the same model: other shapes, evaluation mode."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from torch import fx

from fxmem.capture import JointGraph
from fxmem.passes.stage_assign import Cuts, Homes, stage_by_position


class Anchors:
    """Cuts remembered by structure: by op where graphs are alike, else by the parameter used last before the cut."""

    def __init__(self, joint: JointGraph, cuts: Cuts) -> None:
        stages = stage_by_position(joint, cuts)
        self._targets = [str(node.target) for node in stages]
        self._stages = list(stages.values())
        self._uses = {use: stages[node] for use, node in _uses(joint)}

    def stages_in(self, joint: JointGraph) -> Homes:
        """Stage of every forward op of `joint`. Some stages may have none (a branch not taken), but for the last."""
        ops = [n for n in joint.nodes[: joint.num_forward_nodes] if n.op == "call_function"]
        if [str(node.target) for node in ops] == self._targets:
            return dict(zip(ops, self._stages, strict=True))
        of_node = {node: self._uses[use] for use, node in _uses(joint) if use in self._uses}
        of_node |= dict.fromkeys([n for n in ops if n is joint.outputs[0]], self._stages[-1])  # the loss
        of_positions = itertools.accumulate((of_node.get(node, 0) for node in ops), max)
        return dict(zip(ops, of_positions, strict=True))


def _uses(joint: JointGraph) -> Iterator[tuple[tuple[str, int], fx.Node]]:
    """((parameter, how many uses of it came before), op) for every forward op that takes a parameter."""
    seen: Counter[str] = Counter()
    for node in joint.nodes[: joint.num_forward_nodes]:
        if node.op == "call_function":
            for argument in node.all_input_nodes:
                name = joint.names.get(argument.name)
                if name is not None:
                    yield (name, seen[name]), node
                    seen[name] += 1
