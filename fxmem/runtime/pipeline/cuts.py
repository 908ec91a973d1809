"""The same cuts in another graph of the same model: other shapes, evaluation mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from fxmem.capture import JointGraph
from fxmem.passes.stage_assign import stage_by_position
from fxmem.passes.stage_split import CutError, Cuts


class Anchors:
    """Cuts remembered by structure: by op where graphs are alike, else by the parameter used last before the cut."""

    def __init__(self, joint: JointGraph, cuts: Cuts) -> None:
        stages = stage_by_position(joint, cuts)
        self._targets = [str(node.target) for node in stages]
        self._stages = list(stages.values())
        self._uses = {use: stages[node] for use, node in _uses(joint)}

    def cuts_in(self, joint: JointGraph) -> dict[int, int]:
        """Stage of every forward op of `joint` by its index. Raises CutError if that graph lacks a stage."""
        ops = [(i, n) for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
        if [str(node.target) for _, node in ops] == self._targets:
            return {i: stage for (i, _), stage in zip(ops, self._stages, strict=True)}
        of_node = {node: self._uses[use] for use, node in _uses(joint) if use in self._uses}
        found: dict[int, int] = {}
        current = 0
        for i, node in ops:
            current = max(current, of_node.get(node, current))
            found[i] = current
        missing = set(self._stages) - set(found.values())
        if missing:
            raise CutError(f"the graph of this shape or mode uses no parameter of stages {sorted(missing)}")
        return found


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
