"""Local search over cuts and in-flight counts; recomputation is solved anew for every neighbour."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, ScheduleMaker

State = tuple[Cuts, tuple[int, ...]]


def improve(
    evaluator: Evaluator,
    best: Candidate,
    state: State,
    make: Callable[[tuple[int, ...]], ScheduleMaker],
    *,
    max_tries: int,
    most_in_flight: int,
    seen: set[State] | None = None,
) -> tuple[Candidate, State]:
    """First-improvement search from `state`: shift a range of cuts, a range of counts, then one cut with one range of
    counts.

    Stops when a whole pass brings nothing or after `max_tries` neighbours; counts stay non-increasing over the stages.
    """
    seen = set() if seen is None else seen
    tries, improved = 0, True
    while improved and tries < max_tries:
        improved = False
        for neighbour in _neighbours(state, len(evaluator.chain), most_in_flight):
            if neighbour in seen:
                continue
            seen.add(neighbour)
            tries += 1
            found = evaluator.evaluate(neighbour[0], make(neighbour[1]), best.step_s * (1 - 1e-7))
            if found is not None:
                best, state, improved = found, neighbour, True
                break
            if tries >= max_tries:
                break
    return best, state


def _neighbours(state: State, length: int, most: int) -> Iterator[State]:
    cuts, counts = state
    moved = list(moved_cuts(cuts, length))
    changed = list(_changed_counts(counts, most))
    singles = set(_single_shifts(cuts, (1,)))
    for other in moved:
        yield other, counts
    for vector in changed:
        yield cuts, vector
    for vector in _single_steps(counts, most):
        yield cuts, vector
    for other in moved:
        for vector in changed if other in singles else _single_steps(counts, most):
            yield other, vector


def moved_cuts(cuts: Cuts, length: int) -> Iterator[Cuts]:
    """Ranges of inner boundaries by one (by more on long chains), single ones by two."""
    strides = sorted({1, max(1, length // 40)}, reverse=True)
    inner = len(cuts) - 2
    for stride in strides:
        for first in range(1, inner + 1):
            for last in range(first, inner + 1):
                for shift in (-stride, stride):
                    yield from _valid(
                        cuts[:first] + tuple(c + shift for c in cuts[first : last + 1]) + cuts[last + 1 :]
                    )
    yield from _single_shifts(cuts, (2,))


def _single_shifts(cuts: Cuts, sizes: Sequence[int]) -> Iterator[Cuts]:
    for position in range(1, len(cuts) - 1):
        for size in sizes:
            for shift in (-size, size):
                yield from _valid((*cuts[:position], cuts[position] + shift, *cuts[position + 1 :]))


def _valid(cuts: Cuts) -> Iterator[Cuts]:
    if all(a < b for a, b in itertools.pairwise(cuts)):
        yield cuts


def _single_steps(counts: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    for position, count in enumerate(counts):
        for shift in (-2, -1, 1, 2):
            yield from _allowed((*counts[:position], count + shift, *counts[position + 1 :]), most)


def _changed_counts(counts: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    for first in range(len(counts)):
        for last in range(first, len(counts)):
            for shift in (-1, 1):
                vector = counts[:first] + tuple(n + shift for n in counts[first : last + 1]) + counts[last + 1 :]
                yield from _allowed(vector, most)


def _allowed(counts: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    if counts and counts[-1] >= 1 and counts[0] <= most and all(a >= b for a, b in itertools.pairwise(counts)):
        yield counts
