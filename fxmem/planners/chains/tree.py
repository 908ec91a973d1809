"""Persistent schedules as trees of decisions, and the compute actions that they stand for.

A persistent schedule keeps each stored value until the backward that reads it last. Every one of them (up to orders
that can't be better) is a tree: a stretch of blocks either saves its first block completely and goes on, or runs ahead
to a later boundary, stores that value, finishes what follows, and comes back to its start (Herrmann et al.,
arXiv:1911.13214).
"""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.simulate import Backward, ComputeAction, Forward, Item, Keep


@dataclass(frozen=True, slots=True)
class Save:
    """Save block ``block`` completely (with a saved set), finish ``rest``, run the block's backward."""

    block: int
    option: int
    rest: Tree | None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Run blocks ``start .. boundary - 1``, store ``a_boundary``, finish ``right``, start again for ``left``."""

    start: int
    boundary: int
    right: Tree
    left: Tree


Tree = Save | Checkpoint


def compute_actions(tree: Tree) -> list[ComputeAction]:
    """The forwards and backwards of a schedule tree, in order."""
    actions: list[ComputeAction] = []
    work: list[Tree | Backward] = [tree]
    while work:
        node = work.pop()
        match node:
            case Backward():
                actions.append(node)
            case Save():
                actions.append(Forward(node.block, Keep.ALL, node.option))
                work.append(Backward(node.block))
                if node.rest is not None:
                    work.append(node.rest)
            case Checkpoint():
                actions.append(Forward(node.start, Keep.INPUT))
                actions += [Forward(i, Keep.NONE) for i in range(node.start + 1, node.boundary)]
                work += [node.left, node.right]
    return actions


def stored_items(tree: Tree) -> list[Item]:
    """Every value that a schedule tree stores, in the order in which it stores them."""
    items: list[Item] = []
    work: list[Tree] = [tree]
    while work:
        node = work.pop()
        if isinstance(node, Save):
            items.append(Item("abar", node.block))
            work += [node.rest] if node.rest is not None else []
        else:
            items.append(Item("a", node.boundary))
            work += [node.left, node.right]
    return items


def save_everything(chain: Chain) -> Tree:
    """The schedule without any recompute."""
    tree: Tree | None = None
    for block in reversed(range(chain.num_blocks)):
        tree = Save(block, 0, tree)
    assert tree is not None
    return tree


def advance_peak(chain: Chain, start: int, boundary: int) -> int:
    """Peak bytes, the input ``a_start`` left out, of running blocks ``start .. boundary - 1`` keeping nothing."""
    return max((chain.a[p] if p > start else 0) + chain.a[p + 1] + chain.wf[p] for p in range(start, boundary))


def promised_peak(chain: Chain, tree: Tree) -> int:
    """Peak bytes of a schedule tree from the recurrence alone (no simulation), the resident bytes included."""
    return chain.resident + _peak(chain, tree, chain.num_blocks - 1)


def _peak(chain: Chain, tree: Tree, last: int) -> int:
    """Peak of a stretch that ends with block ``last``, its input left out."""
    waiting = chain.g[last + 1] if last + 1 < chain.num_blocks else 0  # the loss gradient comes later
    if isinstance(tree, Checkpoint):
        return max(
            waiting + advance_peak(chain, tree.start, tree.boundary),
            chain.a[tree.boundary] + _peak(chain, tree.right, last),
            _peak(chain, tree.left, tree.boundary - 1),
        )
    i, option = tree.block, chain.options(tree.block)[tree.option]
    forward = waiting + option.abar + option.wf
    backward = chain.g[i + 1] + option.abar + chain.g[i] + option.wb
    rest = 0 if tree.rest is None else option.abar + _peak(chain, tree.rest, last)
    return max(forward, backward, rest)


def promised_s(chain: Chain, tree: Tree) -> float:
    """Seconds of a schedule tree, without moves."""
    total = 0.0
    work: list[Tree] = [tree]
    while work:
        node = work.pop()
        if isinstance(node, Save):
            option = chain.options(node.block)[node.option]
            total += option.u + option.v
            work += [node.rest] if node.rest is not None else []
        else:
            total += sum(chain.u[node.start : node.boundary])
            work += [node.left, node.right]
    return total
