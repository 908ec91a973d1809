"""The least extra seconds of any schedule in the captured order, by searching every schedule of a small problem."""

import heapq
import itertools
import math

from fxmem.planners.problem import Problem

Place = tuple[int, frozenset[int]]
"""Next kernel of the captured order, forward storages on the device."""


def least_extra_s(problem: Problem, budget_bytes: int) -> float:
    """Dijkstra over (next kernel of the captured order, forward storages on the device). Moves: run the next kernel,
    skip it (a forward kernel that need not run), run a forward kernel again in backward, forget a storage. inf if
    nothing fits."""
    room = budget_bytes - problem.base_bytes
    start: Place = (0, frozenset())
    best, queue, tie = {start: 0.0}, [(0.0, 0, start)], itertools.count(1)
    while queue:
        spent, _, (at, alive) = heapq.heappop(queue)
        if spent > best[at, alive]:
            continue
        if at == problem.num_kernels:
            return spent - float(problem.seconds.sum())
        for cost, after in _moves(problem, at, alive, room):
            if spent + cost < best.get(after, math.inf):
                best[after] = spent + cost
                heapq.heappush(queue, (spent + cost, next(tie), after))
    return math.inf


def _moves(
    problem: Problem, at: int, alive: frozenset[int], room: int
) -> list[tuple[float, tuple[int, frozenset[int]]]]:
    moves: list[tuple[float, tuple[int, frozenset[int]]]] = []
    in_backward = at >= problem.num_forward
    ran = _run(problem, at, alive, at, room)
    if ran is not None:
        moves.append((float(problem.seconds[at]), (at + 1, ran)))
    if not in_backward and not problem.must_run[at] and not problem.keep_to_end[problem.writes(at)].any():
        moves.append((0.0, (at + 1, alive)))
    for kernel in range(problem.num_forward if in_backward else 0):
        if problem.recomputable[kernel]:
            again = _run(problem, kernel, alive, at, room)
            if again is not None and again != alive:
                moves.append((float(problem.seconds[kernel]), (at, again)))
    moves += [(0.0, (at, alive - {s})) for s in alive if not problem.keep_to_end[s]]
    return moves


def _run(problem: Problem, kernel: int, alive: frozenset[int], at: int, room: int) -> frozenset[int] | None:
    """Storages of forward alive after running `kernel` while `at` is next; None if it lacks an operand or room."""
    nf = problem.num_forward
    writes = {int(s) for s in problem.writes(kernel)}
    if any(problem.producer[s] < nf and int(s) not in alive for s in problem.reads(kernel)):
        return None
    copies = [s for s in writes if problem.keep_to_end[s] and s in alive]
    forward = alive | {s for s in writes if problem.producer[s] < nf}
    level = int(problem.nbytes[list(forward)].sum() if forward else 0) + sum(int(problem.nbytes[s]) for s in copies)
    level += _backward_bytes(problem, kernel if kernel >= nf else at, running=kernel >= nf)
    return forward if level + int(problem.workspace_bytes[kernel]) <= room else None


def _backward_bytes(problem: Problem, at: int, running: bool) -> int:
    """Bytes of storages made by backward that stand while `at` runs (or just before it)."""
    total = 0
    for s in range(problem.num_storages):
        made = int(problem.producer[s])
        if made < problem.num_forward or made > at or (made == at and not running):
            continue
        readers = [k for k in range(at, problem.num_kernels) if s in problem.reads(k)]
        if problem.keep_to_end[s] or readers or made == at:
            total += int(problem.nbytes[s])
    return total
