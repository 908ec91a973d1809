"""The border of a region: what is needed whole, what has to wait for it, and in which order all runs."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Set
from itertools import pairwise
from typing import Any

from torch import fx

from fxmem import compat
from fxmem.analysis.region import Item, Loop, base_of, is_getitem, maker, tensors_made
from fxmem.analysis.region_growth import Growth
from fxmem.analysis.split_rules import tensor_args
from fxmem.capture.draws import RNG_STATE
from fxmem.capture.effects import is_collective, is_random
from fxmem.capture.overwritten import written_args


class Border:
    """Of the region that `growth` found, as it stands.

    `whole`: tensors to be put together or added up. `rederived`: members that run whole as well. `levels`: of members.
    """

    def __init__(self, growth: Growth, fuse: bool) -> None:
        self.growth, self.fuse = growth, fuse
        self.members = growth.in_order()
        self.first_backward = growth.joint.num_forward_nodes
        self.whole: set[fx.Node] = set()
        self.rederived: set[fx.Node] = set()
        self._find_whole()
        self.levels: dict[fx.Node, int] = {}
        self._outside: dict[fx.Node, int] = {}
        self._find_levels()

    def runs_early(self, member: fx.Node) -> bool:
        """Does the member run in forward?"""
        return self.fuse or self.growth.index[member] < self.first_backward

    def sources(self, tensor: fx.Node) -> Iterator[fx.Node]:
        """Who has to run before all of `tensor` can be read: a member (all its parts), or a node outside."""
        op = maker(tensor)
        if op in self.rederived:
            for argument in op.all_input_nodes:
                yield from self.sources(argument)
        else:
            yield op if op in self.growth.members else tensor

    def reads(self, member: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
        """(node, in parts that other members make?) for all that a member reads."""
        ways = dict(zip(tensor_args(member), self.growth.members[member].inputs, strict=True))
        for node in member.all_input_nodes:
            yield node, ways.get(node) is not None and isinstance(self.growth.made.get(node), int)

    def is_whole(self, tensor: fx.Node) -> bool:
        """Is there a moment at which `tensor`, which a member makes, stands whole?"""
        return tensor in self.whole or maker(tensor) in self.rederived

    def is_own(self, tensor: fx.Node) -> bool:
        """Do members make the bytes of `tensor`: is it no view of what comes from outside?"""
        base = base_of(tensor)
        return tensor in self.growth.made and (base is None or self.is_own(base))

    def is_in_parts(self, tensor: fx.Node) -> bool:
        """Does `tensor` never stand whole, nor what it is a view of?"""
        return isinstance(self.growth.made[tensor], int) and not self.is_whole(tensor) and self.is_own(tensor)

    def _find_whole(self) -> None:
        needed: set[fx.Node] = set()
        for op in reversed(self.members):
            for tensor, _ in tensors_made(op):
                if tensor not in needed and not self._is_needed(tensor):
                    continue
                base = base_of(tensor)
                if base is None or self.growth.made[tensor] == "sum" or not self._can_derive(tensor, base, needed):
                    self.whole.add(tensor)
                else:
                    self.rederived.add(op)
                    needed.add(base)

    def _is_needed(self, tensor: fx.Node) -> bool:
        return any(
            u not in self.growth.members or tensor in self.growth.reads_whole(u)
            for u in tensor.users
            if not (is_getitem(u) and u in self.growth.made)
        )

    def _can_derive(self, tensor: fx.Node, base: fx.Node, needed: Set[fx.Node]) -> bool:
        """Is it no dearer to have the base whole: because it is anyhow, or is hardly larger?"""
        is_there = base not in self.growth.made or self.growth.made[base] == "sum"
        is_hardly_larger = _extent_bytes(base) <= 2 * _extent_bytes(tensor)
        return is_there or base in needed or self._is_needed(base) or is_hardly_larger

    def _find_levels(self) -> None:
        for node in self.growth.nodes:
            if node in self.growth.members:
                reads = self.reads(node)
                found = [self.levels[maker(n)] if in_parts else self._whole_level(n) for n, in_parts in reads]
                self.levels[node] = max(found, default=0)
            elif node not in self.growth.made:
                self._outside[node] = max(map(self._whole_level, node.all_input_nodes), default=0)
        for member in reversed(self.members):
            if self.growth.index[member] >= self.first_backward:
                self._sink(member)

    def _whole_level(self, tensor: fx.Node) -> int:
        return max(
            (self.levels[s] + 1 if s in self.levels else self._outside.get(s, 0) for s in self.sources(tensor)),
            default=0,
        )

    def _sink(self, member: fx.Node) -> None:
        """Let a member of backward run in the first loop that reads it, not in one long before."""
        made = [t for t, _ in tensors_made(member)]
        readers = [u for t in made for u in t.users if u in self.levels]
        if readers and not any(map(self.is_whole, made)):
            self.levels[member] = max(self.levels[member], min(self.levels[u] for u in readers))


def _extent_bytes(tensor: fx.Node) -> int:
    """Bytes from a tensor's first element to its last."""
    value: Any = tensor.meta["val"]
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (int(last) + 1) * int(value.element_size())


class CyclicOrder(Exception):
    """A loop would have to run both before and after `item`, which overwrites what it reads."""

    def __init__(self, item: fx.Node) -> None:
        super().__init__(item.name)
        self.item = item


def in_order(border: Border, outside: Collection[fx.Node], early: bool) -> tuple[Item, ...]:
    """What runs in one phase, forward (`early`) or backward: the nodes `outside` and the loops, in a fixed order.

    As captured where dependencies and effects allow, each loop as soon as all that it reads is there.
    Raises CyclicOrder if there is no order.
    """
    order = _Order(border, outside, early)
    return tuple(order.run())


class _Order:
    def __init__(self, border: Border, outside: Collection[fx.Node], early: bool) -> None:
        self.border, self.index = border, border.growth.index
        members = [m for m in border.members if border.runs_early(m) == early]
        grouped: dict[int, list[fx.Node]] = defaultdict(list)
        for member in members:
            grouped[border.levels[member]].append(member)
        loops = [Loop(level, tuple(group)) for level, group in grouped.items()]
        self.item_of: dict[fx.Node, Item] = {m: loop for loop in loops for m in loop.members}
        self.item_of |= {node: node for node in outside}
        self.nodes = sorted(self.item_of, key=self.index.__getitem__)
        self.before: dict[Item, set[Item]] = {item: set() for item in self.item_of.values()}
        self._by_data()
        self._by_effects()
        self._by_writes()

    def run(self) -> Iterator[Item]:
        """Kahn's algorithm; of what is ready, the item that was captured first."""
        after: dict[Item, list[Item]] = defaultdict(list)
        for item, before in self.before.items():
            for other in before:
                after[other].append(item)
        left = {item: len(before) for item, before in self.before.items()}
        ready = [(self._priority(item), item) for item, count in left.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            item = heapq.heappop(ready)[1]
            del left[item]
            yield item
            for other in after[item]:
                left[other] -= 1
                if left[other] == 0:
                    heapq.heappush(ready, (self._priority(other), other))
        if left:
            raise CyclicOrder(next(item for item in left if isinstance(item, fx.Node)))

    def _priority(self, item: Item) -> int:
        return min(map(self.index.__getitem__, item.members)) if isinstance(item, Loop) else self.index[item]

    def _precede(self, one: fx.Node, other: fx.Node) -> None:
        first, second = self.item_of.get(one), self.item_of.get(other)
        if first is not None and second is not None and first is not second:
            self.before[second].add(first)

    def _by_data(self) -> None:
        for node in self.nodes:
            is_member = node in self.border.growth.members
            reads = self.border.reads(node) if is_member else ((n, False) for n in node.all_input_nodes)
            for argument, in_parts in reads:
                for source in [maker(argument)] if in_parts else self.border.sources(argument):
                    self._precede(source, node)

    def _by_effects(self) -> None:
        """Draws, collectives and writes keep the order they were captured in."""
        outside = [n for n in self.nodes if n not in self.border.growth.members]
        effects = [n for n in outside if is_random(n) or is_collective(n) or written_args(n) or n.target is RNG_STATE]
        for one, other in pairwise(effects):
            self._precede(one, other)

    def _by_writes(self) -> None:
        """Who reads what is overwritten sees the old bytes or the new ones as before."""
        arguments = (argument for node in self.nodes for argument in written_args(node))
        written = {key for argument in arguments for key in compat.storage_keys(argument)}
        users: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self.nodes if written else ():
            for key in {k for n in (node, *node.all_input_nodes) for k in compat.storage_keys(n)} & written:
                users[key].append(node)
        for key, nodes in users.items():
            for position, node in enumerate(nodes):
                if any(key in compat.storage_keys(argument) for argument in written_args(node)):
                    for other in nodes[:position]:
                        self._precede(other, node)
                    for other in nodes[position + 1 :]:
                        self._precede(node, other)


def ancestors_among(nodes: Iterable[fx.Node], among: Collection[fx.Node]) -> set[fx.Node]:
    """What `nodes` depend on, through nodes `among` only (themselves left out)."""
    found: set[fx.Node] = set()
    todo = [a for node in nodes for a in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in among and node not in found:
            found.add(node)
            todo.extend(node.all_input_nodes)
    return found
