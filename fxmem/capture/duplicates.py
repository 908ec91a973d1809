"""Merge ops that compute the same from the same arguments (index tables, masks): no plan should pay for them twice.

A merged value stands from its first run to its last reader, which may be longer than each run's result would. So two
are merged only where that takes no more bytes at any time: the first is still there when the second would run, or what
only the second needs meanwhile weighs as much. (Otherwise a step without a plan would need more than eager mode.)
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.effects import is_collective, is_pure, is_random
from fxmem.capture.overwritten import written_args


def merge_duplicates(graph: fx.Graph) -> None:
    """Let readers of a repeated op read an earlier run. `graph`: functional, but for updates of inputs; in the order in
    which it runs.

    What is returned is left alone, so that no two results become one tensor. From the last op to the first, so that of
    what leads to a merged op nothing remains either.
    """
    merger = _Merger(graph)
    for node in reversed(list(graph.nodes)):
        for original in reversed(merger.equal_before(node)):
            if merger.costs_no_bytes(original, node):
                merger.merge(original, node)
                break
    merger.finish()


class _Merger:
    """Which ops are equal, and when each storage is read: by nodes of the graph, kept up to date while they go.

    `_equal[node]`: nodes that compute the same, in order, `node` among them; only of ops that may be merged.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._position = {node: position for position, node in enumerate(graph.nodes)}
        self._equal = _equal_nodes(graph)
        self._same: dict[int, int] = {}  # storage of a merged node -> the one that its readers read now
        self._gone: dict[int, torch.Tensor] = {}  # storage -> a tensor of it, which keeps the storage's identity taken
        self._readers: dict[int, set[fx.Node]] = defaultdict(set)
        self._made: dict[int, int] = {}
        for node, position in self._position.items():
            for key in self._read_by(node):
                self._readers[key].add(node)
            for key in self._storages(node):
                self._made.setdefault(key, position)
        inputs = (key for node in graph.find_nodes(op="placeholder") for key in self._storages(node))
        self._stays = set(inputs).union(self._read_by(graph.output_node()))

    def equal_before(self, node: fx.Node) -> list[fx.Node]:
        """Earlier nodes that compute the same as `node`, in order; none if `node` may not or need not be merged."""
        equal = self._equal.get(node, [])
        return equal[: equal.index(node)] if node.users and node in equal else []

    def costs_no_bytes(self, original: fx.Node, node: fx.Node) -> bool:
        """Does reading `original` instead of running `node` take no more bytes at any time?"""
        position = self._position[node]
        mine = self._storages(original)
        ends = {key: self._last(key, set()) for key in mine}
        longer_bytes = sum(nbytes for key, nbytes in mine.items() if ends[key] < position)
        if not longer_bytes:
            return True
        start = max(self._position[original], min(ends.values()))
        dead = self._only_for(node)
        freed = {key: nbytes for n in dead for key, nbytes in self._read_by(n).items() if self._made[key] < start}
        return longer_bytes <= sum(n for key, n in freed.items() if key not in mine and self._last(key, dead) <= start)

    def merge(self, original: fx.Node, node: fx.Node) -> None:
        """Let the readers of `node` read `original`; `node`, and what only it needed, go."""
        dead = self._only_for(node)
        for key, later in zip(self._storages(original), self._storages(node), strict=True):
            if key != later:
                self._same[later] = key
                self._readers[key] |= self._readers.pop(later, set())
                self._stays |= {key} if later in self._stays else set()
        self._gone |= {compat.storage_key(t): t for t in compat.tensors_of(node) if compat.storage_key(t) in self._same}
        node.replace_all_uses_with(original)
        for each in sorted(dead, key=self._position.__getitem__, reverse=True):
            for key in self._read_by(each):
                self._readers[key].discard(each)
            self._equal[each].remove(each)
            self.graph.erase_node(each)

    def finish(self) -> None:
        """A view of what went is a view of another storage now: its fake value is made again."""
        for node in self.graph.nodes:
            if node.op == "call_function" and any(compat.storage_key(t) in self._gone for t in compat.tensors_of(node)):
                _make_value_again(node)

    def _only_for(self, node: fx.Node) -> set[fx.Node]:
        """`node`, and the ops without effects whose results nothing else reads."""
        dead, todo = {node}, [node]
        while todo:
            for argument in todo.pop().all_input_nodes:
                if argument not in dead and argument in self._equal and dead.issuperset(argument.users):
                    dead.add(argument)
                    todo.append(argument)
        return dead

    def _last(self, key: int, without: set[fx.Node]) -> float:
        """Position of the last node, `without` some, that reads a storage: never, if nobody does."""
        if key in self._stays:
            return float("inf")
        return max((self._position[n] for n in self._readers[key] if n not in without), default=-1)

    def _storages(self, node: fx.Node) -> dict[int, int]:
        """Storage -> bytes, of what `node` returns."""
        found: dict[int, int] = {}
        for tensor in compat.tensors_of(node):
            key = compat.storage_key(tensor)
            while key in self._same:
                key = self._same[key]
            found[key] = compat.hint(compat.storage_nbytes(tensor))
        return found

    def _read_by(self, node: fx.Node) -> dict[int, int]:
        """Storage -> bytes, of what `node` takes."""
        return {key: nbytes for argument in node.all_input_nodes for key, nbytes in self._storages(argument).items()}


def _equal_nodes(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Node -> the nodes that compute the same, in order, one list for all of them; only of ops that may be merged."""
    numbers: dict[fx.Node, int] = {}
    groups: dict[Any, list[fx.Node]] = {}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        key = (node.target, _frozen((node.args, node.kwargs), numbers)) if _may_merge(node) else node
        group = groups.setdefault(key, [])
        group.append(node)
        numbers[node] = numbers[group[0]] if len(group) > 1 else len(numbers)
        if key is not node:
            found[node] = group
    return found


def _may_merge(node: fx.Node) -> bool:
    """Pure, and nobody outside or in place touches the result."""
    if node.op != "call_function" or node.is_impure() or is_random(node) or is_collective(node) or not is_pure(node):
        return False
    return not written_args(node) and not any(user.op == "output" or node in written_args(user) for user in node.users)


def _make_value_again(node: fx.Node) -> None:
    """Run a view on the fake value that its base has now."""
    values = [t.fake_mode for t in compat.tensors_of(node) if isinstance(t, compat.FakeTensor)]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with values[0]:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def _frozen(value: Any, numbers: dict[fx.Node, int]) -> Any:
    """`value` hashable, with the numbers of nodes; types told apart, since 1 == 1.0 == True."""
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(item, numbers)) for name, item in sorted(value.items()))
    return ("node", numbers[value]) if isinstance(value, fx.Node) else (type(value), str(value))
