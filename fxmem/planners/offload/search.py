"""Keep, recompute or offload, chosen together: what `auto` does when it may use a tier.

Starts of many kinds (`starts`) are each repaired greedily and polished; then randomised search from the best.
Recompute-only plans and those of the chain planners are among the starts, so the result is never worse than one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np

from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.planners.chains.graph_starts import chain_solutions, plan_alone
from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import State
from fxmem.planners.kernel.joint import JointKernel, JointScore, offloadable, within
from fxmem.planners.offload.bound import OffloadBound
from fxmem.planners.offload.starts import JointCutFamily, first_states, three_way_states
from fxmem.planners.problem import Problem
from fxmem.planners.recompute import search as recompute
from fxmem.planners.recompute.bound import LowerBound, free_lunch_s, least_bytes
from fxmem.planners.recompute.evict import evicted_states
from fxmem.planners.recompute.mincut import CutFamily
from fxmem.planners.recompute.replay import started, state_of
from fxmem.planners.registry import Options, Solution, by_speed
from fxmem.planners.stakes import stakes
from fxmem.planners.tiers import fits, spread, together
from fxmem.schedule import simulate
from fxmem.schedule.actions import Offload, Tier

_CLOSED = 1e-6  # a gap of this share of the step counts as none
_NUM_KEPT = 6
_HARDLY = 0.85  # of a quick recompute-only plan's extra seconds: worth comparing with a thorough one
_VIRTUAL_SHARES = (0.0, 0.15, 0.3, 0.5)
_PROVEN = 1e-8  # a gap of this share of the step: no other planner can do better
_BOUND_SHARE, _BOUND_MOMENTS = 0.1, 3  # of the time, and moments, to rule out plans without the link
_TEMPERATURES = (1e-2, 3e-3)  # of a search, in steps, lap by lap over the states kept
_ROUNDS = 15  # of a search, before it goes on to another of the states kept


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
        known = any(
            abs(score.extra_s - extra) <= 1e-12 and score.moved_bytes == moved for extra, moved, *_ in self.fitting
        )
        if score.peak_bytes <= self.budget_bytes and not known:
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
        if self.is_closed:
            return
        for state in states:
            self.improve(state, deadline_s)
            if self.is_closed or self.kernel.effort.now() > deadline_s:
                return


def search(pool: JointPool, deadline_s: float, seed: int) -> None:
    """Perturb the best states in turn, a few rounds each, until the deadline."""
    kernel, budget = pool.kernel, pool.budget_bytes
    kernel.two_way.seed(seed)
    turn = 0
    while pool.fitting and not pool.is_closed and kernel.effort.now() < deadline_s:
        kernel.load(pool.fitting[turn % len(pool.fitting)][3])
        temperature = _TEMPERATURES[turn // _NUM_KEPT % len(_TEMPERATURES)]
        kernel.perturb(budget, deadline_s - kernel.effort.now(), _ROUNDS, temperature=temperature)
        score = kernel.polish(budget, 2, deadline_s)
        pool.add(score, kernel.store())
        turn += 1


def plan_with_offload(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Least extra time found under the budget in `solve_s`, on tiers that hold no more than they can.

    The search is for the fastest tier; of its plan, what that one can't hold, or what is sooner there, goes to others.
    Raises BudgetInfeasible with the smallest peak found, OptionError when the machine has none of the tiers.
    """
    tiers = by_speed(options)
    if not tiers:
        raise OptionError(f"the machine has no {' or '.join(options.tiers)} tier")
    rivals = _Rivals(problem, budget_bytes, options)
    found = _plan_on(tiers[0], problem, budget_bytes, options, rivals)
    result = simulate(problem.program, found.actions, options.machine)
    candidates = [found] if fits(result, options.machine) else []
    if len(tiers) > 1 and result.bytes_moved:
        actions = spread(problem, found.actions, options)
        notes = {**found.notes, "tier": "+".join(tiers)}
        candidates += [replace(found, actions=actions, notes=notes)] if actions else []
    if not fits(result, options.machine):
        candidates += _on_a_full_tier(tiers[0], problem, budget_bytes, options, rivals, found, bool(candidates))
    best_s, best = min(((_extra_s(problem, one, options), one) for one in candidates), key=lambda pair: pair[0])
    return replace(best, lower_bound_s=min(found.lower_bound_s, best_s))


def _on_a_full_tier(
    tier: Tier,
    problem: Problem,
    budget_bytes: int,
    options: Options,
    rivals: _Rivals,
    found: Solution,
    has_other: bool,
) -> list[Solution]:
    """A plan for `tier` alone, which can't hold all that `found` puts there. Raises BudgetInfeasible if there is none,
    unless there is another plan."""
    wanted = {action.storage for action in found.actions if isinstance(action, Offload)}
    can = offloadable(problem, options.pinned)
    fitting = within(problem, can, options.machine.capacity_bytes[tier], wanted)
    pinned = options.pinned | set(np.flatnonzero(fitting == 0).tolist())
    try:
        return [_plan_on(tier, problem, budget_bytes, replace(options, pinned=pinned), rivals)]
    except BudgetInfeasible:
        if has_other:
            return []
        raise


def _extra_s(problem: Problem, found: Solution, options: Options) -> float:
    return simulate(problem.program, found.actions, options.machine).seconds - problem.baseline_s


class _Rivals:
    """What other planners give under the caller's own options, found when first asked for."""

    def __init__(self, problem: Problem, budget_bytes: int, options: Options) -> None:
        self.problem, self.budget_bytes, self.options = problem, budget_bytes, options

    @cached_property
    def solutions(self) -> list[Solution]:
        """Of those that know a link."""
        return list(chain_solutions(self.problem, self.budget_bytes, self.options))

    @cached_property
    def alone(self) -> Solution | BudgetInfeasible:
        """Just what `auto` answers without a tier."""
        options = replace(self.options, tiers=(), effort=Effort())
        try:
            found = plan_alone(self.problem, self.budget_bytes, options)
            return replace(found, notes={"tier": "none: the link is too slow"})
        except BudgetInfeasible as error:
            return error
        finally:
            self.options.effort.spend(options.effort.now())


def _plan_on(tier: Tier, problem: Problem, budget_bytes: int, options: Options, rivals: _Rivals) -> Solution:
    """`plan_with_offload` on a tier without an end."""
    run = _Run(problem, budget_bytes, options, tier, rivals)
    run.start()
    if budget_bytes >= problem.base_bytes:
        run.improve()
    pool = run.pool
    if pool.best is None and run.other is None:
        pool.improve(run.smallest(), 0.0)
    if run.alone_might_win():
        run.recompute_only()
    if run.other is not None and run.other[0] < pool.best_s:
        return replace(run.other[1], lower_bound_s=min(pool.floor_s, run.other[0]))
    if pool.best is None:
        assert run.least is not None
        raise run.least
    notes = {"tier": str(tier), "candidates": len(pool.seen), "work": run.effort.work}
    return Solution(run.kernel.actions(pool.best, budget_bytes, tier), min(pool.floor_s, pool.best_s), notes)


class _Run:
    """One call of the joint planner; deadlines are shares of its limit."""

    def __init__(self, problem: Problem, budget_bytes: int, options: Options, tier: Tier, rivals: _Rivals) -> None:
        self.effort = options.effort
        self.options, self.tier, self.rivals, self.limit = options, tier, rivals, stakes(problem, options)
        can = offloadable(problem, options.pinned)
        self.kernel = JointKernel(problem, options.machine.links[tier], can, self.effort)
        self.pool = JointPool(self.kernel, budget_bytes, -free_lunch_s(problem))
        self.budget_bytes = budget_bytes
        self.alone_s = float("inf")  # extra seconds of the best recompute-only plan seen
        self.other: tuple[float, Solution] | None = None  # the fastest plan of another planner, with its extra seconds
        self.kernel.load(self.kernel.all_saved())
        self.peak_bytes = self.kernel.evaluate(budget_bytes).peak_bytes
        self.least: BudgetInfeasible | None = None  # if the smallest peak was looked for

    def until(self, share: float) -> float:
        """The moment at which `share` of the time is spent."""
        return self.limit.until(share, self.pool.best_s - self.pool.floor_s)

    def start(self) -> None:
        """Greedily from everything saved: often enough on a fast link; and from the plan given, if any."""
        self.pool.improve(self.kernel.all_saved(), self.until(0.5))
        if self.options.start is not None:
            self.pool.improve(started(self.kernel.problem, self.options.start), self.until(0.5))

    def improve(self) -> None:
        """Everything the joint planner knows, until nothing is left to gain or time is up."""
        kernel, pool, budget = self.kernel, self.pool, self.budget_bytes
        family, bound = JointCutFamily(kernel), OffloadBound(kernel, together(self.options), budget, pool.floor_s)
        pool.improve_all(first_states(kernel, family, budget, self.peak_bytes), self.until(0.12))
        self.certify(bound, self.until(0.17))
        pool.improve_all(self.recomputing(family, self.until(0.21)), self.until(0.23))
        pool.improve_all(three_way_states(kernel, family, budget), self.until(0.27))
        self.chains()
        if self.link_hardly_helps() and self.alone_might_win():
            # recomputation alone gets its full time afterwards
            self.limit = replace(self.limit, limit_s=self.limit.limit_s / 2)
        search(pool, self.until(0.87), self.options.seed)
        if not pool.is_closed:
            bound.solve(self.until(0.97), True, pool.best_s)
            self.learn(bound)
        search(pool, self.until(1.0), self.options.seed + 1)

    def certify(self, bound: OffloadBound, deadline_s: float) -> None:
        """Linear bounds, moment by moment; what the solver proposes is a candidate."""
        while not self.pool.is_closed and self.effort.now() < deadline_s:
            if not bound.step(deadline_s, False):
                return
            self.learn(bound)

    def learn(self, bound: OffloadBound) -> None:
        """Take the bound, and the solver's last proposal as a candidate."""
        self.pool.floor_s = max(self.pool.floor_s, bound.seconds)
        if bound.states:
            self.pool.improve(bound.states[-1], self.until(1.0))

    def recomputing(self, family: CutFamily, deadline_s: float) -> Iterator[State]:
        """Good recompute-only plans of this budget and of looser ones, the rest being left to the link."""
        for share in _VIRTUAL_SHARES:
            budget = int(self.budget_bytes + share * (self.peak_bytes - self.budget_bytes))
            pool = recompute.Pool(self.kernel.two_way, budget, self.peak_bytes)
            now = self.effort.now()
            recompute.quick(pool, family, now + (deadline_s - now) / 3)
            if share == 0.0:
                self.alone_s = pool.best_s
            yield from [state for *_, state in pool.fitting[:2]]

    def link_hardly_helps(self) -> bool:
        """Whether a longer look at recomputation alone might beat the joint plan."""
        return not self.pool.is_closed and self.pool.best_s > _HARDLY * self.alone_s

    def chains(self) -> None:
        """The chain planners' plans, as they are and as states to improve on, unless nothing can be faster than what
        there is. With no time limit given, their time is on top of the search's."""
        if self.pool.best_s - self.pool.floor_s <= _PROVEN * self.kernel.problem.baseline_s:
            return
        began = self.effort.now()
        solutions = self.rivals.solutions
        if self.options.solve_s is None:
            self.limit = replace(self.limit, started_s=self.limit.started_s + self.effort.now() - began)
        for found in solutions:
            self.compare(found)
            self.pool.improve(state_of(self.kernel.problem, found.actions), self.until(0.5))

    def compare(self, found: Solution) -> float:
        """Remember another planner's plan if it is the fastest such; returns its extra seconds."""
        extra_s = _extra_s(self.kernel.problem, found, self.options)
        if self.other is None or extra_s < self.other[0]:
            self.other = extra_s, found
        return extra_s

    def alone_might_win(self) -> bool:
        """Whether a plan without the link could still be faster: its own bound, a few moments of it, does not rule it
        out."""
        best_s, problem = self.pool.best_s, self.kernel.problem
        if self.pool.is_closed or self.budget_bytes < least_bytes(problem):
            return False
        bound = LowerBound(problem, self.kernel.cand, self.budget_bytes, effort=self.effort)
        deadline_s = self.effort.now() + _BOUND_SHARE * self.limit.limit_s
        while len(bound.moments) < _BOUND_MOMENTS and self.effort.now() < deadline_s:
            more = bound.step(deadline_s, best_s)
            if best_s <= bound.seconds + _PROVEN * problem.baseline_s:
                return False
            if not more:
                break
        return True

    def recompute_only(self) -> None:
        """Compare with what `auto` finds without a tier."""
        found = self.rivals.alone
        if isinstance(found, Solution):
            self.alone_s = min(self.alone_s, self.compare(found))

    def smallest(self) -> State:
        """Bisect for the smallest peak that greedy repair reaches, from where recomputation alone gets."""
        kernel, alone, budget = self.kernel, self.rivals.alone, self.budget_bytes
        if isinstance(alone, Solution):
            return state_of(kernel.problem, alone.actions)
        deadline_s = self.effort.now() + self.limit.smallest_s / 2
        start = state_of(kernel.problem, alone.actions)
        kernel.load(start)
        low, best = kernel.problem.base_bytes, (kernel.evaluate(0).peak_bytes, start)
        while best[0] - low > max(1, best[0] // 1000) and self.effort.now() < deadline_s:
            middle = (low + best[0]) // 2
            pool = JointPool(kernel, middle, float("-inf"))
            starts = evicted_states(kernel.two_way, middle, self.peak_bytes, (0.0, 0.3))
            for state in (best[1], kernel.all_saved(), *starts):
                pool.improve(state, deadline_s, passes=0)
                if pool.best is not None:
                    break
            if pool.nearest is not None and pool.nearest[0] < best[0]:
                best = pool.nearest
            if pool.best is None:
                low = middle
        self.least = alone
        if best[0] < alone.min_bytes:
            actions = kernel.actions(best[1], best[0], self.tier)
            self.least = recompute.infeasible_beyond(kernel.problem, budget, best[0], actions, self.options.machine)
        return best[1]
