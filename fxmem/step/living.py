"""The callables of a step, none of which it keeps alive.

Dynamo keeps every backend it was ever given, and the code it compiled for as long as the model's class exists: what
they lead to stays in memory with them. So they lead to a step weakly, and it leads weakly to the models.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Living(Iterable[Callable[..., Any]]):
    """Callables, those left out that nobody else holds any more."""

    def __init__(self, functions: Iterable[Callable[..., Any]] = ()) -> None:
        self._found: list[Callable[[], Callable[..., Any] | None]] = []
        self.add(functions)

    def add(self, functions: Iterable[Callable[..., Any]]) -> None:
        """After those that are here."""
        self._found = [ref for ref in self._found if ref() is not None] + [_weakly(f) for f in functions]

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter([function for ref in self._found if (function := ref()) is not None])


def _weakly(function: Callable[..., Any]) -> Callable[[], Callable[..., Any] | None]:
    if isinstance(function, types.MethodType):
        return weakref.WeakMethod(function)
    try:
        return weakref.ref(function)
    except TypeError:  # of a class with slots
        return lambda: function
