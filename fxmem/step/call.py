"""One call of a graph, from its forward until no backward of it can come any more."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fxmem import compat
from fxmem.step.arguments import Arguments
from fxmem.step.joined import Made
from fxmem.step.measurement import mark

if TYPE_CHECKING:
    from fxmem.step.graph import Graph, Variant

Key = tuple[Any, ...]
"""What tells calls apart: the graph and the values of its size symbols."""


@dataclass(frozen=True)
class Output:
    """Position among what a call returned."""

    call: int
    position: int


@dataclass
class Call:
    """One forward in flight. `undefined`: outputs whose gradient came in no backward of it; None before the first.

    `origins`: where each argument's storage comes from, if it was recorded: another call's
    `Output`, a key of what stood before the episode, or None for what was made in between.
    `argument_bytes`: of the storages behind its arguments, which may be parts of larger ones.
    `is_first`: it runs under a limit, and nobody knew what else its step calls. `again`: what runs before its backward,
    if it gave back what it saved.
    """

    number: int
    graph: Graph
    key: Key
    values: Mapping[str, int]
    variant: Variant
    origins: tuple[Any, ...] = ()
    argument_bytes: int = 0
    is_first: bool = False
    arguments: Arguments | None = None
    outputs: list[tuple[int, weakref.ref[Tensor]] | None] = field(default_factory=list)
    dropped: frozenset[int] = frozenset()
    undefined: frozenset[int] | None = None
    is_open: bool = True
    is_differentiated: bool = False  # its backward, to be differentiated itself, ran in eager mode
    node: weakref.ref[Any] | None = None  # of autograd, if it is the only one
    again: Variant | None = None

    def origin(self, position: int, renumbered: Mapping[int, int], calls: Mapping[int, Call]) -> Made | Key | None:
        """Where argument number `position` comes from, in terms of the calls that a plan knows."""
        found = self.origins[position]
        if not isinstance(found, Output):
            return found  # type: ignore[no-any-return]
        number = calls[found.call].graph.outputs.get(found.position) if found.call in renumbered else None
        return None if number is None else Made(renumbered[found.call], number)

    def drop(self) -> None:
        """No backward can come any more, but for one that has begun."""
        self.is_open = False

    @property
    def saved_bytes(self) -> int:
        """What waits for its backward."""
        return self.variant.saved_bytes if self.is_open and self.again is None else 0

    @cached_property
    def gradient_bytes(self) -> tuple[int, int]:
        """Of what its backward is given, and of what it returns."""
        return self.graph.gradient_bytes(self.values)

    @property
    def can_be_given_back(self) -> bool:
        """May what it saved go, because forward can run again?"""
        is_simple = self.is_open and self.again is None and self.variant.transfers_nothing
        return is_simple and self.node is not None and self.arguments is not None and self.arguments.can_run_again

    def give_back(self, owner: int, again: Variant) -> None:
        """Let go of what it saved, if that can be: forward runs again, as `again`, before its backward."""
        node = self.node() if self.node is not None else None
        if node is None or not self.can_be_given_back:
            return
        mark(owner, f"G= {self.number}")
        if compat.give_back_saved(node):
            self.again = again
        mark(owner, f"H= {self.number}")

    def backward_again(self) -> Callable[[list[Any]], Any]:
        """Forward, run again; returns the backward that belongs to it. Raises CaptureError."""
        assert self.arguments is not None
        assert self.again is not None
        outputs = self.arguments.forward_again(self.again.code)
        roots = [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]
        (node,) = compiled_nodes(roots)
        return compat.compiled_backward(node)


def compiled_nodes(roots: Iterable[Tensor]) -> Iterator[Any]:
    """The autograd nodes of compiled code behind `roots`, each once; outputs that are views have others on top."""
    seen: set[Any] = set()
    level = [root.grad_fn for root in roots]
    for _ in range(3):
        below = []
        for node in level:
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "CompiledFunctionBackward":
                yield node
            else:
                below += [n for n, _ in node.next_functions]
        level = below
