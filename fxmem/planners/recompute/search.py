"""Recomputation alone: everything saved, a family of minimum cuts and look-ahead eviction, each repaired and polished;
then randomised search from the best of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from fxmem.errors import BudgetInfeasible
from fxmem.planners.effort import Effort
from fxmem.planners.kernel.binding import Kernel, Score, State
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.blocks import storage_classes
from fxmem.planners.recompute.bound import LowerBound, least_bytes
from fxmem.planners.recompute.evict import NoisyEviction, evicted_states
from fxmem.planners.recompute.mincut import CutFamily, cut_states
from fxmem.planners.recompute.replay import started
from fxmem.planners.recompute.tiny import Tiny, is_tiny
from fxmem.planners.registry import Options, Solution
from fxmem.planners.stakes import Stakes, stakes
from fxmem.schedule import Action, Machine, simulate

Nested = Callable[[int], State | None]
"""A planner of nested recomputation: bytes of a budget -> its state, if it has one."""
_NUM_KEPT = 6
_MAX_MOMENTS = 8
_ROUNDS = 100  # of perturbing one state before it is the next one's turn
_TEMPERATURES = (3e-3, 1e-3, 1e-2)  # in steps, lap by lap over the states kept
_FIRST_TURNS = 18  # before the solver's turn, whose time is hardly ever well spent where these help
_SHARE_ABOVE = 600  # kernels; below, every storage is worth its own look
_TURNS = 12  # a state's turn to be perturbed takes at most such a part of the time for all
_PATIENCE, _IMPATIENCE = 8, 2  # sixteenths of a search without anything better; where perturbing brought nothing either
_MOST_HOPELESS = 2  # budgets in a row that brought nothing nearer to fitting
_REPAIR_SHARE = 0.125  # of the effort for a budget: of repairing what had a larger one
_NESTED_S = 1.0  # of effort that must be left for it to be worth a nested plan


class Pool:
    """States tried so far: the cheapest that fit, and the one nearest to fitting."""

    def __init__(self, kernel: Kernel, budget_bytes: int, peak_bytes: int) -> None:
        self.kernel, self.budget_bytes, self.peak_bytes = kernel, budget_bytes, peak_bytes
        self.fitting: list[tuple[float, int, State]] = []
        self.nearest: tuple[int, State] | None = None
        self.seen: set[bytes] = set()
        self.num_tried = 0

    @property
    def best(self) -> State | None:
        return self.fitting[0][2] if self.fitting else None

    @property
    def best_s(self) -> float:
        return self.fitting[0][0] if self.fitting else float("inf")

    def add(self, score: Score, state: State) -> None:
        """Remember `state`, whose exact score is `score`."""
        if self.nearest is None or score.peak_bytes < self.nearest[0]:
            self.nearest = (score.peak_bytes, state)
        if score.peak_bytes > self.budget_bytes:
            return
        if all(abs(score.extra_s - known) > 1e-12 for known, *_ in self.fitting):
            self.num_tried += 1
            self.fitting.append((score.extra_s, self.num_tried, state))
            self.fitting.sort(key=lambda entry: entry[:2])
            del self.fitting[_NUM_KEPT:]

    def improve(self, state: State, deadline_s: float = 0.0, look: int = 8) -> Score | None:
        """Repair and polish `state`; None if a state like it was tried before."""
        key = state.saved.tobytes() + repr(state.drops).encode()
        if key in self.seen:
            return None
        self.seen.add(key)
        self.kernel.load(state)
        score = self.kernel.repair(self.budget_bytes, look, deadline_s=deadline_s)
        if score.peak_bytes <= self.budget_bytes:
            score = self.kernel.polish(self.budget_bytes, deadline_s=deadline_s)
        self.add(score, self.kernel.store())
        return score


def first_states(pool: Pool, family: CutFamily) -> Iterator[State]:
    """Candidates in the order in which they tend to pay."""
    kernel, budget = pool.kernel, pool.budget_bytes
    yield from evicted_states(kernel, budget, pool.peak_bytes, (0.0, 0.3))
    cuts = list(cut_states(kernel, family, budget))
    over = float(pool.kernel.problem.baseline_s) / max(pool.peak_bytes, 1)
    cuts.sort(key=lambda cut: cut[0].extra_s + over * max(0, cut[0].peak_bytes - budget))
    kept: set[bytes] = set()
    for _, state in cuts:
        if len(kept) < _NUM_KEPT and state.saved.tobytes() not in kept:
            kept.add(state.saved.tobytes())
            yield state
    yield from evicted_states(kernel, budget, pool.peak_bytes, (0.1, 0.2, 0.05, 0.5, -0.03))
    yield kernel.all_saved()


def quick(pool: Pool, family: CutFamily, deadline_s: float) -> None:
    """The generators, each candidate repaired and polished."""
    for state in first_states(pool, family):
        pool.improve(state, deadline_s)
        if pool.kernel.effort.now() > deadline_s:
            return


def certify(pool: Pool, bound: LowerBound, deadline_s: float, max_moments: int) -> None:
    """Raise the bound, moment by moment; every schedule that the solver proposes is a candidate."""
    while len(bound.moments) < max_moments and pool.kernel.effort.now() < deadline_s and not bound.closes(pool.best_s):
        found = len(bound.states)
        more = bound.step(deadline_s, pool.best_s)
        for state in bound.states[found:]:
            pool.improve(state, deadline_s)
        if not more:
            return


def perturb(pool: Pool, deadline_s: float, turns: Iterable[int]) -> None:
    """The states kept, perturbed in turn, a hundred rounds each at most."""
    most_s = (deadline_s - pool.kernel.effort.now()) / _TURNS
    for turn in turns:
        if not pool.fitting or pool.kernel.effort.now() >= deadline_s:
            return
        at, lap = turn % len(pool.fitting), turn // _NUM_KEPT
        pool.kernel.load(pool.fitting[at][2])
        left_s, temperature = deadline_s - pool.kernel.effort.now(), _TEMPERATURES[lap % len(_TEMPERATURES)]
        score = pool.kernel.perturb(pool.budget_bytes, min(left_s, most_s), _ROUNDS, temperature=temperature)
        pool.add(score, pool.kernel.store())


def search(pool: Pool, until: Callable[[], float], seed: int, patience: int) -> None:
    """In turn noisy evictions, each promising one perturbed a little, and the states kept, perturbed. Ends at the
    deadline, which comes nearer as there is less to gain, or when nothing better has come for `patience` sixteenths."""
    kernel, budget = pool.kernel, pool.budget_bytes
    deadline_s = until()
    noisy = NoisyEviction(kernel, budget, pool.peak_bytes, seed)
    kernel.seed(seed)
    effort = kernel.effort
    slice_s = max(0.02, (deadline_s - effort.now()) / 16)
    improved_s, known, turns = effort.now(), pool.best_s, itertools.count()
    while effort.now() < min(deadline_s, improved_s + patience * slice_s):
        end = min(deadline_s, effort.now() + 2 * slice_s)
        while effort.now() < end:
            _noisy_step(pool, noisy, deadline_s)
        perturb(pool, min(deadline_s, effort.now() + 2 * slice_s), turns)
        if pool.best_s < known:
            improved_s, known = effort.now(), pool.best_s
            deadline_s = until()


def _noisy_step(pool: Pool, noisy: NoisyEviction, deadline_s: float) -> None:
    state, setting = noisy.propose()
    score = pool.improve(state, deadline_s, look=4)
    if score is None:
        return
    if score.peak_bytes > pool.budget_bytes:
        noisy.accept(1e6 + score.over_bytes, setting)
        return
    if score.extra_s < 1.1 * pool.best_s:
        left_s = min(0.05, deadline_s - pool.kernel.effort.now())
        score = pool.kernel.perturb(pool.budget_bytes, left_s, 20, temperature=0.0)
        pool.add(score, pool.kernel.store())
    noisy.accept(score.extra_s, setting)


def smallest(
    kernel: Kernel, family: CutFamily, peak_bytes: int, deadline_s: float, seed: int, nested: Nested = lambda _: None
) -> tuple[int, State]:
    """Bisect for the smallest peak that the generators, `nested` and a little search reach: (bytes, state)."""
    low, best = least_bytes(kernel.problem), (peak_bytes, kernel.all_saved())
    asked, hopeless = False, 0
    while best[0] - low > max(1, best[0] // 1000) and kernel.effort.now() < deadline_s and hopeless < _MOST_HOPELESS:
        middle = (low + best[0]) // 2
        pool = Pool(kernel, middle, peak_bytes)
        end = min(deadline_s, kernel.effort.now() + (deadline_s - kernel.effort.now()) / 3)
        pool.improve(best[1], kernel.effort.now() + _REPAIR_SHARE * (end - kernel.effort.now()))
        for state in () if pool.best is not None else evicted_states(kernel, middle, peak_bytes):
            pool.improve(state, end)
            if pool.best is not None or kernel.effort.now() > end:
                break
        if pool.best is None and not asked:
            asked, proposed = True, nested(middle)
            if proposed is not None:
                pool.improve(proposed, end)
        if pool.best is None:
            _first_fit(pool, family, end, seed)
        assert pool.nearest is not None
        hopeless += 1
        if pool.nearest[0] < best[0]:
            best, hopeless = pool.nearest, 0
        if pool.best is None:
            low = middle
    return best


def _first_fit(pool: Pool, family: CutFamily, deadline_s: float, seed: int) -> None:
    for _, state in cut_states(pool.kernel, family, pool.budget_bytes, directions=2, steps=6):
        pool.improve(state, deadline_s)
        if pool.best is not None:
            return
    noisy = NoisyEviction(pool.kernel, pool.budget_bytes, pool.peak_bytes, seed)
    while pool.best is None and pool.kernel.effort.now() < deadline_s:
        state, setting = noisy.propose()
        score = pool.improve(state, deadline_s, look=4)
        if score is not None:
            noisy.accept(score.peak_bytes, setting)


def plan_recompute(problem: Problem, budget_bytes: int, options: Options, nested: Nested = lambda _: None) -> Solution:
    """Least extra time found under the budget in `solve_s` by recomputation alone; `nested` is asked where forward has
    to run more than twice.

    Raises BudgetInfeasible with the smallest peak found.
    """
    limit, effort = stakes(problem, options), options.effort
    kernel = Kernel(problem, effort=effort)
    if problem.num_kernels > _SHARE_ABOVE:
        kernel.share(storage_classes(problem))
    kernel.load(kernel.all_saved())
    peak_bytes = kernel.evaluate(budget_bytes).peak_bytes
    fits = peak_bytes <= budget_bytes
    if not fits and is_tiny(problem):
        outright = _outright(problem, budget_bytes, effort, limit.limit_s / 2)
        if outright is not None:
            return outright
    pool = Pool(kernel, budget_bytes, peak_bytes)
    bound = LowerBound(problem, kernel.cand, budget_bytes, effort=effort)
    if options.start is not None and not fits:
        pool.improve(started(problem, options.start), limit.started_s + limit.limit_s)
    pool.improve(kernel.all_saved() if fits else next(evicted_states(kernel, budget_bytes, peak_bytes)))
    if peak_bytes > budget_bytes >= least_bytes(problem):
        improve(pool, bound, CutFamily(kernel), limit, options, nested)
    if pool.best is None:
        deadline_s = effort.now() + limit.smallest_s
        found = smallest(kernel, CutFamily(kernel), peak_bytes, deadline_s, options.seed, nested)
        if found[0] > budget_bytes:
            raise infeasible(kernel, budget_bytes, *found)
        pool.improve(found[1])
    assert pool.best is not None
    return solution(kernel, pool.best, bound.seconds, {"candidates": len(pool.seen), "work": effort.work})


def improve(pool: Pool, bound: LowerBound, family: CutFamily, limit: Stakes, options: Options, nested: Nested) -> None:
    """Everything `auto` knows, until the bound is reached, nothing more is found, time is up, or what is left to gain
    is worth less."""

    def until(share: float, of_gain: float = 1.0) -> float:
        return limit.until(share, of_gain * (pool.best_s - bound.seconds))

    def say(message: str) -> None:
        if options.progress is not None:
            extra = 100 * pool.best_s / max(pool.kernel.problem.baseline_s, 1e-30)
            spent_s = pool.kernel.effort.now() - limit.started_s
            options.progress(spent_s, f"{message}; best so far +{extra:.2f} %")

    is_barren = False
    if options.certify:
        say("first bound")
        certify(pool, bound, until(0.2), 1)
    say("candidates")
    if not bound.closes(pool.best_s):
        quick(pool, family, until(0.3))
        _nest(pool, until(1.0), nested)
        pool.kernel.seed(options.seed)
        known = pool.best_s
        perturb(pool, until(0.4, 0.5), range(_FIRST_TURNS))  # the rest is the bound's
        is_barren = pool.best_s >= known
    if options.certify:
        say("bound")
        certify(pool, bound, until(0.45), _MAX_MOMENTS)
        bound.finish(until(0.7), pool.best_s)
        for state in bound.states:
            pool.improve(state, until(1.0))
    say("search")
    if not bound.closes(pool.best_s):
        search(pool, lambda: until(1.0), options.seed, _IMPATIENCE if is_barren else _PATIENCE)


def _nest(pool: Pool, deadline_s: float, nested: Nested) -> None:
    """Where all of forward, or more, is run again, look at a plan that is made for that."""
    problem, now = pool.kernel.problem, pool.kernel.effort.now()
    if pool.best_s < float(problem.seconds[: problem.num_forward].sum()) or now + _NESTED_S > deadline_s:
        return
    state = nested(pool.budget_bytes)
    if state is not None:
        pool.improve(state, deadline_s)


def _outright(problem: Problem, budget_bytes: int, effort: Effort, limit_s: float) -> Solution | None:
    """The fastest of all schedules, if the problem is small enough to tell.

    Raises BudgetInfeasible with the smallest peak that there is.
    """
    tiny = Tiny(problem, effort, limit_s)
    found = tiny.fastest(budget_bytes)
    if found is not None:
        extra_s = float(problem.seconds[list(found.order)].sum()) - problem.baseline_s
        return Solution(problem.actions(found.order, found.num_forward), extra_s, {"optimal": True})
    found = tiny.smallest() if tiny.is_solved else None
    if found is None:
        return None
    actions = problem.actions(found.order, found.num_forward)
    raise infeasible_beyond(problem, budget_bytes, simulate(problem.program, actions).peak_bytes, actions)


def solution(kernel: Kernel, state: State, lower_bound_s: float, notes: Mapping[str, object]) -> Solution:
    """The actions of `state`."""
    kernel.load(state)
    order, num_forward = kernel.order()
    return Solution(kernel.problem.actions(order, num_forward), lower_bound_s, notes)


def infeasible(kernel: Kernel, budget_bytes: int, least: int, state: State) -> BudgetInfeasible:
    """The error that names the smallest feasible budget and what stands at its peak."""
    return infeasible_beyond(kernel.problem, budget_bytes, least, solution(kernel, state, 0.0, {}).actions)


def infeasible_beyond(
    problem: Problem, budget_bytes: int, least: int, actions: tuple[Action, ...], machine: Machine | None = None
) -> BudgetInfeasible:
    """`infeasible`, with the schedule that needs `least` bytes."""
    result = simulate(problem.program, actions, machine)
    step = result.peak_step
    alive = [s for s, first, last in result.lifetimes if first <= step <= last and problem.producer[s] >= 0]
    names = [(problem.program.ops[problem.program.producer[s]].shown, int(problem.nbytes[s])) for s in alive]
    names.append(("parameters, inputs and whatever else is resident", problem.base_bytes))
    return BudgetInfeasible(budget_bytes, least, sorted(names, key=lambda item: -item[1])[:8], actions=actions)
