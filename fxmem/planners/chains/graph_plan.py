"""Chain planners on real graphs: a program becomes a chain of blocks, a chain schedule becomes the program's actions.

The chain is a model (skips and masks are pinned, transients approximated); the program simulator is the judge. Each
planner searches its own knob (slots, or the chain's budget) for the most generous schedule whose simulated peak is
within the budget, over a few ways of cutting the graph, and keeps the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.planners.chains.graph_blocks import Blocks, choose_cuts, split
from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.offload import greedy, offload_all, offload_dp
from fxmem.planners.chains.plan import disk_revolve
from fxmem.planners.chains.pofo import pofo
from fxmem.planners.chains.revolve import mean, opt_table, revolve_tree
from fxmem.planners.chains.rotor import RotorTable
from fxmem.planners.chains.simulate import Action as ChainAction
from fxmem.planners.chains.simulate import Backward, Forward, Item, Keep
from fxmem.planners.chains.simulate import Free as ChainFree
from fxmem.planners.chains.simulate import Offload as ChainOffload
from fxmem.planners.chains.simulate import Reload as ChainReload
from fxmem.planners.chains.simulate import Wait as ChainWait
from fxmem.planners.chains.simulate import simulate as simulate_chain
from fxmem.planners.chains.tree import compute_actions, save_everything
from fxmem.planners.kernel.joint import offloadable, within
from fxmem.planners.problem import Problem
from fxmem.planners.registry import Options, Planner, Solution, by_speed, register
from fxmem.schedule import Action, Machine, simulate
from fxmem.schedule.actions import Compute, Free, Offload, Recompute, Reload, StartBackward, Tier, Wait

BLOCK_COUNTS = (64, 32, 16, 8)
NUM_SLOTS = 400
MOST_WORK = 100_000  # actions judged per knob; a schedule that was dear to find counts as more
_ACTION_S = 25e-6  # of judging one
_WORK_PER_S = 5_000  # of `solve_s`, so that all knobs together take about that long
_LEAST_WORK = 5_000
_DP_WORK, _POFO_WORK = 1_000, 5_000  # of one call

Knob = Callable[[int], Sequence[ChainAction] | None]


@dataclass
class _Emitter:
    """The program's actions for a chain schedule, with what is on the device at each point."""

    blocks: Blocks
    tier: Tier
    may_move: npt.NDArray[np.uint8]
    actions: list[Action] = field(default_factory=list)
    have: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)  # given up, their copies on the tier
    ran: set[int] = field(default_factory=set)
    stored: set[Item] = field(default_factory=set)
    floating: int = 0
    moving: dict[Item, list[int]] = field(default_factory=dict)
    arriving: set[int] = field(default_factory=set)
    option: dict[int, int] = field(default_factory=dict)

    def of(self, item: Item) -> frozenset[int]:
        """The storages of a stored value."""
        return self.blocks.boundary[item.at] if item.kind == "a" else self.blocks.saved[item.at][self.option[item.at]]

    def run(self, kernel: int) -> None:
        """Run a kernel after whatever it reads and is not there."""
        problem = self.blocks.problem
        work = [kernel]
        while work:
            at = work[-1]
            missing = [s for s in problem.operands[at] if s not in self.have]
            for storage in [s for s in missing if s in self.away]:
                self.bring_back(storage)
                missing.remove(storage)
            if missing:
                work += [int(problem.producer[s]) for s in missing]
                continue
            work.pop()
            if at == kernel or not self.have.issuperset(problem.results[at]):
                self.actions.append((Recompute if at in self.ran else Compute)(int(problem.kernel_op[at])))
                self.ran.add(at)
                self.have.update(problem.results[at])

    def bring_back(self, storage: int) -> None:
        """Reload (if that has not begun) and wait for a storage that is away."""
        if storage not in self.arriving:
            self.actions.append(Reload(storage))
        self.actions.append(Wait(storage))
        self.arriving.discard(storage)
        self.away.discard(storage)
        self.have.add(storage)

    def forward(self, action: Forward) -> None:
        i, blocks = action.block, self.blocks
        keep_all = action.keep is Keep.ALL
        if self.floating == i and action.keep is not Keep.NONE:
            self.stored.add(Item("a", i))
        targets = set(blocks.saved[i][action.option] if keep_all else blocks.boundary[i + 1])
        for kernel in self.wanted(i, targets):
            self.run(kernel)
        if keep_all:
            self.stored.add(Item("abar", i))
            self.option[i] = action.option
        self.floating = 0 if keep_all else i + 1
        self.drop()

    def wanted(self, block: int, targets: set[int]) -> list[int]:
        """Kernels of a block that make ``targets``; in its first run also what is pinned, drawn, or has effects."""
        problem, chosen = self.blocks.problem, []
        need = {s for s in targets if s not in self.have}
        for kernel in reversed(self.blocks.forward[block]):
            made = set(problem.results[kernel])
            once = kernel not in self.ran and (
                bool(problem.must_run[kernel]) or bool(self.blocks.fixed[kernel]) or not made
                or not made.isdisjoint(self.blocks.pinned)
            )
            if once or not made.isdisjoint(need):
                chosen.append(kernel)
                need |= set(problem.operands[kernel]) - self.have
        return chosen[::-1]

    def backward(self, action: Backward) -> None:
        if action.block == self.blocks.chain.num_blocks - 1:
            self.actions.append(StartBackward())
        for kernel in self.blocks.backward[action.block]:
            self.run(kernel)
        self.stored -= {Item("abar", action.block), Item("a", action.block)}
        self.floating = 0
        self.drop()

    def drop(self) -> None:
        """Forget what the schedule holds no longer: the simulator lets it die after its last read."""
        problem = self.blocks.problem
        held = set(self.blocks.pinned) | (set(self.blocks.boundary[self.floating]) if self.floating else set())
        for item in self.stored:
            held |= self.of(item)
        self.have &= held | problem.made_in_backward

    def move(self, action: ChainOffload | ChainFree | ChainReload | ChainWait) -> None:
        item = action.item
        if isinstance(action, ChainOffload):
            taken = {s for storages in self.moving.values() for s in storages}
            fresh = sorted(s for s in self.of(item) & self.have - taken if self.may_move[s])
            self.moving[item] = fresh
            self.actions += [Offload(s, self.tier) for s in fresh]
            return
        for storage in self.moving[item]:
            if isinstance(action, ChainFree):
                self.actions.append(Free(storage))
                self.have.discard(storage)
                self.away.add(storage)
            elif storage in self.away and isinstance(action, ChainReload):
                self.actions.append(Reload(storage))
                self.arriving.add(storage)
            elif storage in self.away:
                self.bring_back(storage)
        if isinstance(action, ChainWait):
            del self.moving[item]


def program_actions(
    blocks: Blocks,
    schedule: Iterable[ChainAction],
    tier: Tier = "host",
    may_move: npt.NDArray[np.uint8] | None = None,
) -> tuple[Action, ...]:
    """The program's actions for a chain schedule; what a kernel misses is recomputed or brought back on the spot.

    `may_move`: mask of the storages that may leave the device (default: `offloadable`).
    """
    emitter = _Emitter(blocks, tier, offloadable(blocks.problem) if may_move is None else may_move)
    for action in schedule:
        match action:
            case Forward():
                emitter.forward(action)
            case Backward():
                emitter.backward(action)
            case _:
                emitter.move(action)
    return tuple(emitter.actions)


@dataclass
class _Search:
    """The best program found under the budget, and the smallest peak seen."""

    problem: Problem
    budget_bytes: int
    machine: Machine
    tier: Tier
    may_move: npt.NDArray[np.uint8]
    best: tuple[float, tuple[Action, ...]] | None = None
    least: tuple[int, tuple[Action, ...]] = (1 << 62, ())
    tried: int = 0
    work: int = 0  # left to the present knob

    def fits(self, blocks: Blocks, schedule: Sequence[ChainAction] | None) -> bool:
        """Judge one chain schedule in the program simulator."""
        if schedule is None:
            return False
        actions = program_actions(blocks, schedule, self.tier, self.may_move)
        result = simulate(self.problem.program, actions, self.machine)
        self.tried += 1
        self.work -= len(actions)
        if result.peak_bytes < self.least[0]:
            self.least = result.peak_bytes, actions
        if result.peak_bytes > self.budget_bytes:
            return False
        if self.best is None or result.seconds < self.best[0]:
            self.best = (result.seconds, actions)
        return True

    def largest(self, blocks: Blocks, knob: Knob, low: int, high: int, price: int) -> None:
        """Bisect for the largest setting of a knob that fits, then look just above it: peaks are not quite monotone.
        Ends when the work that is left is done; each setting costs ``price`` beside what it plays."""
        while low <= high and self.work > 0:
            middle = (low + high) // 2
            self.work -= price
            if self.fits(blocks, knob(middle)):
                low = middle + 1
            else:
                high = middle - 1
        for extra in (1, 2):
            if self.work > 0:
                self.work -= price
                self.fits(blocks, knob(low + extra))


KnobMaker = Callable[[Blocks], tuple[Knob, int, int]]


def rotor_knob(blocks: Blocks) -> tuple[Knob, int, int]:
    """rotor by slots, one table for all of them."""
    chain, last = blocks.chain, blocks.chain.num_blocks - 1
    room = chain_peak(chain) - chain.resident
    table = RotorTable(chain, room, NUM_SLOTS)
    finite = np.flatnonzero(np.isfinite(table.time[0, last]))
    least = int(finite[0]) if len(finite) else table.num + 1  # none: in whole slots the chain does not fit its own room

    def knob(num: int) -> Sequence[ChainAction] | None:
        return compute_actions(table.tree(0, last, num)) if least <= num <= table.num else None

    return knob, least, table.num


def revolve_knob(blocks: Blocks) -> tuple[Knob, int, int]:
    """revolve by checkpoint slots."""
    chain = blocks.chain
    length, u = chain.num_blocks, mean(chain.u)
    table = opt_table(length - 1, length, u, mean(chain.v))

    def knob(slots: int) -> Sequence[ChainAction] | None:
        return compute_actions(revolve_tree(0, length - 1, slots, table, u)) if 1 <= slots <= length else None

    return knob, 1, length


ChainPlanner = Callable[[Chain, int], Sequence[ChainAction] | None]


def budget_knob(planner: ChainPlanner, steps: int) -> KnobMaker:
    """A chain planner, its chain budget in ``steps`` steps up to the chain's all-saved peak."""

    def make(blocks: Blocks) -> tuple[Knob, int, int]:
        chain, peak = blocks.chain, chain_peak(blocks.chain)

        def knob(step: int) -> Sequence[ChainAction] | None:
            budget = chain.resident + (peak - chain.resident) * step // steps
            return planner(chain, budget)

        return knob, 1, steps

    return make


def chain_peak(chain: Chain) -> int:
    """Peak bytes of a chain with everything saved."""
    return simulate_chain(chain, compute_actions(save_everything(chain))).peak_bytes


def cuttings(problem: Problem, counts: Iterable[int]) -> Iterator[Blocks]:
    """The program as a chain, cut ever more coarsely."""
    seen = set[tuple[int, ...]]()
    for count in counts:
        cuts = choose_cuts(problem, count)
        if tuple(cuts) not in seen:
            seen.add(tuple(cuts))
            yield split(problem, cuts)


Tries = Sequence[tuple[KnobMaker, Sequence[int], int]]
"""Knobs, each with its block counts and the work that one setting costs beside playing it."""


def most_work(options: Options) -> int:
    """Work of one knob. It is counted, not timed: a planner's answer is the same on every machine, and the same where
    `auto` asks for it."""
    if options.solve_s is None:
        return MOST_WORK
    return int(min(MOST_WORK, max(_LEAST_WORK, _WORK_PER_S * options.solve_s)))


def chain_planner(tries: Tries, moves: bool) -> Planner:
    """A program planner: the fastest that fits over some knobs, each over some block counts. It finds nothing slower
    than a planner whose tries are the first of its own."""

    def plan(problem: Problem, budget_bytes: int, options: Options) -> Solution:
        tier = _tier(options) if moves else "host"
        may_move = within(problem, offloadable(problem, options.pinned), options.machine.capacity_bytes.get(tier))
        search = _Search(problem, budget_bytes, options.machine, tier, may_move)
        for make, counts, price in tries:
            allowed = search.work = most_work(options)
            for blocks in cuttings(problem, counts):
                if search.work <= 0:
                    break
                if search.best is not None and search.best[0] <= problem.baseline_s * (1 + 1e-9):
                    break  # no time is added: nothing is left to gain
                if moves:
                    link = options.machine.links[tier]
                    beta = min(link.in_bytes_per_s, link.out_bytes_per_s)
                    blocks = replace(blocks, chain=replace(blocks.chain, beta=beta))
                if not search.fits(blocks, compute_actions(save_everything(blocks.chain))):
                    search.largest(blocks, *make(blocks), price)
            options.effort.spend(_ACTION_S * (allowed - search.work))
        if search.best is None:
            raise BudgetInfeasible(budget_bytes, search.least[0], actions=search.least[1])
        return Solution(search.best[1], 0.0, {"schedules tried": search.tried})

    return plan


def _tier(options: Options) -> Tier:
    tier = next(iter(by_speed(options)), None)
    if tier is not None:
        return tier
    raise OptionError("this planner moves bytes off the device: name a tier that the machine has, as in tiers='host'")


_ROTOR: Tries = [(rotor_knob, BLOCK_COUNTS, 0)]
_OFFLOAD: Tries = [(budget_knob(offload_dp, 64), (48, 24, 12), _DP_WORK), (budget_knob(offload_all, 64), (64,), 0)]
_PLANNERS: dict[str, tuple[Tries, bool]] = {
    "revolve": ([(revolve_knob, BLOCK_COUNTS, 0)], False),
    "rotor": (_ROTOR, False),
    "offload-all": ([(budget_knob(offload_all, 64), BLOCK_COUNTS, 0)], True),
    "offload-greedy": ([(budget_knob(greedy, 64), BLOCK_COUNTS, 0)], True),
    "offload-dp": (_OFFLOAD, True),
    "disk-revolve": ([(budget_knob(disk_revolve, 64), (32, 16, 8), _DP_WORK)], True),
    "pofo": ([*_ROTOR, *_OFFLOAD, (budget_knob(partial(pofo, effort=4000), 32), (16, 8), _POFO_WORK)], True),
}
for _name, (_tries, _moves) in _PLANNERS.items():
    register(_name)(chain_planner(_tries, _moves))
