"""The chain planners by name: a chain and a budget in, a judged plan out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fxmem.planners.chains.model import Chain, ChainError
from fxmem.planners.chains.offload import greedy, offload_all, offload_dp
from fxmem.planners.chains.place import place
from fxmem.planners.chains.pofo import pofo
from fxmem.planners.chains.revolve import disk_revolve_tree, fitting_revolve, mean, opt_table
from fxmem.planners.chains.rotor import rotor_tree
from fxmem.planners.chains.simulate import Action, ChainRun, Item, played, simulate
from fxmem.planners.chains.tree import Checkpoint, Save, Tree, compute_actions, save_everything


@dataclass(frozen=True, slots=True)
class ChainPlan:
    """A schedule of a chain with what the simulator found: peak (bytes), time (seconds)."""

    planner: str
    actions: tuple[Action, ...]
    peak_bytes: int
    time_s: float


def _tree_actions(tree: Tree | None) -> list[Action] | None:
    return None if tree is None else list(compute_actions(tree))


def save_all(chain: Chain, budget: int) -> list[Action] | None:
    """The plain schedule, whatever the budget: the judge decides whether it fits."""
    return _tree_actions(save_everything(chain))


def sqrt(chain: Chain, budget: int) -> list[Action] | None:
    """Equal segments, each recomputed whole (Chen et al., arXiv:1604.06174); the segment length that fits and is
    fastest.
    """
    length, best = chain.num_blocks, None
    for size in range(1, length + 1):
        actions = list(compute_actions(_segments(chain, size)))
        run = simulate(chain, actions)
        if run.peak_bytes <= budget and (best is None or run.time_s < best[0]):
            best = (run.time_s, actions)
    return None if best is None else list(best[1])


def _segments(chain: Chain, size: int) -> Tree:
    """Segments of ``size`` blocks: checkpoints between them, every block saved while its segment is differentiated."""
    starts = list(range(0, chain.num_blocks, size))
    tree: Tree | None = None
    for start in reversed(starts):
        stop, segment = min(start + size, chain.num_blocks), None
        for block in reversed(range(start, stop)):
            segment = Save(block, 0, segment)
        assert segment is not None
        tree = segment if tree is None else Checkpoint(start, stop, tree, segment)
    assert tree is not None
    return tree


def revolve(chain: Chain, budget: int) -> list[Action] | None:
    """revolve with the most slots that fit (the chain taken as homogeneous)."""
    return _tree_actions(fitting_revolve(chain, budget))


def rotor(chain: Chain, budget: int) -> list[Action] | None:
    """The best persistent schedule, memory in 500 slots."""
    return _tree_actions(rotor_tree(chain, budget))


def disk_revolve(chain: Chain, budget: int) -> list[Action] | None:
    """disk-revolve with the slot count that is fastest in the simulator; its disk checkpoints travel asynchronously."""
    u, v, best = mean(chain.u), mean(chain.v), None
    copy_s = mean(chain.a) / chain.beta
    memory = opt_table(chain.num_blocks - 1, chain.num_blocks, u, v)
    for slots in range(1, chain.num_blocks + 1):
        two = disk_revolve_tree(memory[: slots + 1], u, v, copy_s, copy_s)
        items = {Item("a", boundary) for boundary in two.on_disk}
        compute, plain = played(chain, compute_actions(two.tree))
        actions = place(chain, compute, items, budget, plain)
        if actions is not None and (best is None or simulate(chain, actions).time_s < best[0]):
            best = (simulate(chain, actions).time_s, actions)
    return None if best is None else best[1]


CHAIN_PLANNERS: dict[str, Callable[[Chain, int], Sequence[Action] | None]] = {
    "save-all": save_all,
    "sqrt": sqrt,
    "revolve": revolve,
    "rotor": rotor,
    "offload-all": offload_all,
    "offload-greedy": greedy,
    "offload-dp": offload_dp,
    "disk-revolve": disk_revolve,
    "pofo": pofo,
}


def judge(planner: str, chain: Chain, budget: int) -> ChainPlan | None:
    """Run a planner and let the simulator judge; None if its schedule does not fit ``budget`` bytes or there is none.

    Raises ``ChainError`` for an unknown planner, naming the choices.
    """
    if planner not in CHAIN_PLANNERS:
        raise ChainError(f"unknown chain planner {planner!r}: choose one of {', '.join(CHAIN_PLANNERS)}")
    actions = CHAIN_PLANNERS[planner](chain, budget)
    if actions is None:
        return None
    run: ChainRun = simulate(chain, actions)
    if run.peak_bytes > budget:
        return None
    return ChainPlan(planner, tuple(actions), run.peak_bytes, run.time_s)
