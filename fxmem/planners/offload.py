"""Keep, recompute or offload, chosen together: what `auto` does when it may use a tier.

Starts of many kinds (`offload_states`) are each repaired greedily and polished; then randomised search from the best.
Recompute-only plans are among the starts, so the result is never worse than one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.planners import auto as recompute
from fxmem.planners.bound import free_lunch_s
from fxmem.planners.kernel import State
from fxmem.planners.offload_kernel import JointKernel, JointScore, offloadable
from fxmem.planners.offload_states import JointCutFamily, first_states, three_way_states
from fxmem.planners.problem import Problem
from fxmem.planners.registry import Options, Solution
from fxmem.schedule.actions import Tier

_CLOSED = 1e-4  # a gap of this share of the step counts as none
_NUM_KEPT = 6
_OVERFLOW_WEIGHT = 4.0  # of the step's seconds, for overflowing by all bytes there are


class JointPool:
    """Three-way states tried so far: the cheapest that fit, and the one nearest to fitting."""

    def __init__(self, kernel: JointKernel, budget_bytes: int, floor_s: float) -> None:
        self.kernel, self.budget_bytes, self.floor_s = kernel, budget_bytes, floor_s
        self.fitting: list[tuple[float, int, int, State]] = []
        self.nearest: tuple[int, State] | None = None
        self.seen: set[bytes] = set()

    @property
    def best(self) -> State | None:
        return self.fitting[0][3] if self.fitting else None

    @property
    def best_s(self) -> float:
        return self.fitting[0][0] if self.fitting else float("inf")

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left to gain."""
        return self.best_s - self.floor_s <= _CLOSED * self.kernel.problem.baseline_s

    def add(self, score: JointScore, state: State) -> None:
        """Remember `state`, whose exact score is `score`."""
        if self.nearest is None or score.peak_bytes < self.nearest[0]:
            self.nearest = (score.peak_bytes, state)
        if score.peak_bytes <= self.budget_bytes:
            self.fitting.append((score.extra_s, score.moved_bytes, len(self.seen), state))
            self.fitting.sort(key=lambda entry: entry[:3])
            del self.fitting[_NUM_KEPT:]

    def improve(self, state: State, deadline_s: float, passes: int = 3) -> JointScore | None:
        """Repair and polish `state`; None if it was tried before."""
        key = state.saved.tobytes() + repr(state.drops).encode()
        if key in self.seen:
            return None
        self.seen.add(key)
        self.kernel.load(state)
        score = self.kernel.evaluate(self.budget_bytes)
        self.add(score, state)
        score = self.kernel.greedy(self.budget_bytes, deadline_s=deadline_s)
        promising = score.extra_s < self.best_s + 0.1 * self.kernel.problem.baseline_s
        if score.peak_bytes <= self.budget_bytes and promising:
            score = self.kernel.polish(self.budget_bytes, passes, deadline_s)
        self.add(score, self.kernel.store())
        return score

    def improve_all(self, states: Iterable[State], deadline_s: float) -> None:
        for state in states:
            self.improve(state, deadline_s)
            if self.is_closed or time.monotonic() > deadline_s:
                return


def search(pool: JointPool, deadline_s: float, seed: int) -> None:
    """Alternate annealing and perturbation of the best states until the deadline."""
    kernel, problem, budget = pool.kernel, pool.kernel.problem, pool.budget_bytes
    kernel.two_way.seed(seed)
    weight = _OVERFLOW_WEIGHT * problem.baseline_s / max(float(problem.nbytes.sum()), 1.0)
    slice_s = max(0.05, (deadline_s - time.monotonic()) / 8)
    turn = 0
    while pool.fitting and not pool.is_closed and time.monotonic() < deadline_s:
        state = pool.fitting[min(turn // 2 % 3, len(pool.fitting) - 1)][3]
        kernel.load(state)
        left_s = min(slice_s, deadline_s - time.monotonic())
        if turn % 2:
            kernel.perturb(budget, left_s, temperature=(1e-3, 0.0)[turn // 2 % 2])
        else:
            kernel.anneal(budget, left_s, (2e-3, 5e-4)[turn // 2 % 2], 1e-5, weight)
        score = kernel.polish(budget, 2, deadline_s)
        pool.add(score, kernel.store())
        turn += 1


def fastest_tier(options: Options) -> Tier | None:
    """The tier of `options.tiers` with the fastest link; None if the machine has none of them."""
    links = [t for t in options.tiers if t in options.machine.links]
    return max(links, key=lambda t: _pace(options, t), default=None)


def _pace(options: Options, tier: Tier) -> float:
    link = options.machine.links[tier]
    return min(link.in_bytes_per_s, link.out_bytes_per_s)


def plan_with_offload(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Least extra time found under the budget in `solve_s` on the fastest tier.

    Raises BudgetInfeasible with the smallest peak found, OptionError when the machine has none of the tiers.
    """
    tier = fastest_tier(options)
    if tier is None:
        raise OptionError(f"the machine has no {' or '.join(options.tiers)} tier")
    limit_s = recompute.default_limit_s(problem) if options.solve_s is None else options.solve_s
    started = time.monotonic()
    kernel = JointKernel(problem, options.machine.links[tier], offloadable(problem, options.pinned))
    pool = JointPool(kernel, budget_bytes, -free_lunch_s(problem))
    kernel.load(kernel.all_saved())
    peak_bytes = kernel.evaluate(budget_bytes).peak_bytes
    pool.improve(kernel.all_saved(), started + limit_s)
    if not pool.is_closed and budget_bytes >= problem.base_bytes:
        improve(pool, peak_bytes, started, limit_s, options)
    if pool.best is None:
        raise BudgetInfeasible(budget_bytes, peak_bytes)
    notes = {"tier": tier, "candidates": len(pool.seen), "work": kernel.two_way.work}
    return Solution(kernel.actions(pool.best, budget_bytes, tier), pool.floor_s, notes)


def improve(pool: JointPool, peak_bytes: int, started: float, limit_s: float, options: Options) -> None:
    """Everything the joint planner knows, until nothing is left to gain or time is up."""
    kernel, budget = pool.kernel, pool.budget_bytes
    family = JointCutFamily(kernel)
    pool.improve_all(first_states(kernel, family, budget, peak_bytes), started + 0.25 * limit_s)
    if not pool.is_closed:
        pool.improve_all(three_way_states(kernel, family, budget), started + 0.4 * limit_s)
    if not pool.is_closed:
        search(pool, started + limit_s, options.seed)
