"""Offloading with fluid freeing: the relaxation behind the offload planners, POFO and their lower bound.

A stored value is kept or moved as a whole, but its bytes leave (and return) continuously while it is on the link. After
the values at the boundaries passed so far, ``moved`` of them offloaded, with the link busy until ``link``, a stretch
that lacks ``need`` bytes can start at ``link - (moved - need) / beta``. The backward is the same process run against
time, except that a value must be back one stretch earlier, when the stretch after its boundary reads it. Beaumont,
Eyraud-Dubois and Shilova, "Optimal GPU-CPU offloading strategies for deep neural network training" (Euro-Par 2020,
doi:10.1007/978-3-030-57675-2_10).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.simulate import Item


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of blocks treated as one step, leaving a stored value at its end.

    ``next``: the first block after it. ``forward_s``, ``backward_s``: seconds; ``forward``, ``backward``: peak bytes
    beside the values stored before it. ``item``, ``size``: the value stored at the end (bytes). ``choice``: what the
    maker needs to rebuild the schedule, the option of a saved block or the slots of a recomputed stretch.
    """

    next: int
    forward_s: float
    backward_s: float
    forward: int
    backward: int
    item: Item
    size: int
    choice: int


@dataclass(frozen=True, slots=True)
class Label:
    """A partial schedule: bytes kept and moved, ``held`` of the moved ones still in use, and two clocks with their
    links.

    ``f``, ``b``: seconds of the forward and of the backward so far; ``f_link``, ``b_link``: when their links fall idle.
    """

    kept: int
    moved: int
    held: int
    f: float
    f_link: float
    b: float
    b_link: float
    came: Label | None = None
    stretch: Stretch | None = None
    offloaded: bool = False


START = Label(0, 0, 0, 0.0, 0.0, 0.0, 0.0)


def extend(label: Label, stretch: Stretch, room: int, beta: float, is_last: bool) -> list[Label]:
    """The label after one more stretch, with its value kept and (unless it is the last) moved. Empty if it can't fit.

    ``room``: bytes of the budget beside the resident ones.
    """
    stored, free = label.kept + label.moved, label.moved - label.held
    f_need, b_need = max(0, stored + stretch.forward - room), max(0, stored + stretch.backward - room)
    if f_need > free or b_need > free:
        return []
    f = max(label.f, label.f_link - (label.moved - f_need) / beta) + stretch.forward_s
    b = max(label.b, label.b_link - (free - b_need) / beta) + stretch.backward_s
    if is_last:  # the first backward lacks it: it has gone before; the last forward lacked it: it comes after
        f = max(f, label.f_link - (label.moved - b_need) / beta)
        b = max(b, label.b_link - (free - f_need) / beta)
    b_link = max(label.b_link, b) + label.held / beta if label.held else label.b_link
    size = stretch.size
    grown = [Label(label.kept + size, label.moved, 0, f, label.f_link, b, b_link, label, stretch)]
    if size and not is_last and beta < math.inf:
        f_link = max(label.f_link, f) + size / beta
        grown.append(Label(label.kept, label.moved + size, size, f, f_link, b, b_link, label, stretch, True))
    return grown


def clocks(label: Label) -> tuple[float, ...]:
    """What a label is compared by."""
    return label.f, label.f_link, label.b, label.b_link


def undominated(labels: Iterable[Label], limit: int) -> list[Label]:
    """The labels no other beats in all four clocks, at most ``limit`` of them, fastest first."""
    chosen: list[tuple[float, ...]] = []
    result: list[Label] = []
    for label in sorted(labels, key=lambda x: (x.f + x.b, x.f_link + x.b_link)):
        mine = clocks(label)
        if any(all(p <= q for p, q in zip(other, mine, strict=True)) for other in chosen):
            continue
        chosen.append(mine)
        result.append(label)
        if len(result) == limit:
            break
    return result


def history(label: Label) -> list[Label]:
    """The labels from the first stretch to this one."""
    steps: list[Label] = []
    current: Label | None = label
    while current is not None and current.stretch is not None:
        steps.append(current)
        current = current.came
    return steps[::-1]


def save_stretch(chain: Chain, block: int, number: int) -> Stretch:
    """Block ``block`` saved with its option ``number``, as a stretch."""
    option = chain.options(block)[number]
    backward = option.abar + chain.g[block + 1] + chain.g[block] + option.wb
    item = Item("abar", block)
    return Stretch(block + 1, option.u, option.v, option.abar + option.wf, backward, item, option.abar, number)
