"""A heterogeneous chain of blocks: what every chain planner reads.

Blocks are numbered from 0 to L - 1 and boundaries from 0 to L: block ``i`` reads the value ``a_i`` and makes
``a_{i+1}``. Its backward reads the gradient ``g_{i+1}``, ``a_i`` and whatever the block saved, and makes ``g_i``.

The model is the one of Herrmann, Beaumont, Eyraud-Dubois, Hermann, Joly and Shilova, "Optimal checkpointing for
heterogeneous chains" (arXiv:1911.13214), with several saved sets to choose from per block as in Rockmate (Zhao et al.,
ICML 2023), and a link on which saved values can leave the device and come back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fxmem.errors import FxmemError


class ChainError(FxmemError, ValueError):
    """A chain or a chain schedule that contradicts itself: sizes that do not match, an action whose input is absent."""


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way of running a block in saving mode: what is saved and what that costs (seconds, bytes).

    ``abar`` holds everything that the backward will read except the block's own input, and always the block's output.
    """

    u: float
    v: float
    abar: int
    wf: int = 0
    wb: int = 0


@dataclass(frozen=True)
class Chain:
    """A chain of ``L`` blocks.

    ``u``, ``v`` (seconds, length L): forward and backward time. ``a`` (bytes, length L + 1): boundary values, ``a[0]``
    the chain's input, which stays on the device throughout. ``abar`` (bytes, length L): all that block i saves, its
    output included. ``wf``, ``wb`` (bytes, length L): workspace of one forward and of one backward (below 0 where
    ``g_i`` and ``g_{i+1}`` share bytes). ``g`` (bytes, length L + 1): gradients of the boundary values; ``()`` means
    the same sizes as ``a``. ``beta``: bytes/s of the link in each direction. ``base`` (bytes): whatever else stays on
    the device. ``more`` (length L, or ``()``): further saved sets.
    """

    u: tuple[float, ...]
    v: tuple[float, ...]
    a: tuple[int, ...]
    abar: tuple[int, ...]
    wf: tuple[int, ...] = ()
    wb: tuple[int, ...] = ()
    g: tuple[int, ...] = ()
    beta: float = math.inf
    base: int = 0
    more: tuple[tuple[BlockOption, ...], ...] = ()

    def __post_init__(self) -> None:
        length = len(self.u)
        for name, default in (("wf", (0,) * length), ("wb", (0,) * length), ("g", self.a), ("more", ((),) * length)):
            if not getattr(self, name):
                object.__setattr__(self, name, default)
        for name, wanted in (("v", 0), ("a", 1), ("abar", 0), ("wf", 0), ("wb", 0), ("g", 1), ("more", 0)):
            if len(getattr(self, name)) != length + wanted:
                raise ChainError(f"a chain of {length} blocks needs {length + wanted} entries in {name!r}")
        if length == 0 or self.beta <= 0:
            raise ChainError("a chain needs at least one block and a link bandwidth above zero")
        self._verify_sizes()

    def _verify_sizes(self) -> None:
        for i in range(self.num_blocks):
            for option in self.options(i):
                if option.abar < self.a[i + 1]:
                    raise ChainError(f"block {i} saves {option.abar} bytes, less than its own output ({self.a[i + 1]})")
        if min(*self.u, *self.v, *self.a, *self.g, *self.wf, self.base) < 0:
            raise ChainError("times and sizes of a chain can't be negative")

    @property
    def num_blocks(self) -> int:
        """The number of blocks L."""
        return len(self.u)

    @property
    def compute_s(self) -> float:
        """Seconds of one forward and backward with everything saved and nothing moved."""
        return math.fsum(self.u) + math.fsum(self.v)

    @property
    def resident(self) -> int:
        """Bytes that are on the device at every moment: ``base`` and the chain's input."""
        return self.base + self.a[0]

    def options(self, block: int) -> tuple[BlockOption, ...]:
        """Every saved set of a block; the first is the plain one."""
        return self._options[block]

    @cached_property
    def _options(self) -> tuple[tuple[BlockOption, ...], ...]:
        plain = map(BlockOption, self.u, self.v, self.abar, self.wf, self.wb)
        return tuple((first, *rest) for first, rest in zip(plain, self.more, strict=True))

    def sub_budget(self, budget: int) -> int:
        """What a budget leaves for the values that come and go."""
        return budget - self.resident


def homogeneous(length: int, u: float = 1.0, v: float = 1.0, size: int = 1, beta: float = math.inf) -> Chain:
    """A chain of equal blocks whose saved set is its output, the setting of Griewank and Walther's revolve."""
    return Chain((u,) * length, (v,) * length, (size,) * (length + 1), (size,) * length, beta=beta)


def prefix_s(times: Sequence[float]) -> list[float]:
    """Prefix sums in seconds, starting with 0."""
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    return sums
