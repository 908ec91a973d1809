"""Facts about a node that are looked up often: found once for each, as graphs are not edited once they are captured."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import fx

T = TypeVar("T")


def per_node(find: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """`find`, called once for each node as long as that lives; its arguments and its value are taken to stay."""
    known: WeakKeyDictionary[fx.Node, T] = WeakKeyDictionary()

    @functools.wraps(find)
    def found(node: fx.Node) -> T:
        if node not in known:
            known[node] = find(node)
        return known[node]

    return found
