"""Chain planners on programs: cuts, emitted actions, budgets held in the program simulator."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.ir.program import Op, Program, Storage
from fxmem.planners.chains.graph_blocks import choose_cuts, crossing_bytes, split
from fxmem.planners.chains.graph_plan import program_actions, rotor_knob
from fxmem.planners.chains.model import Chain
from fxmem.planners.chains.tree import compute_actions, save_everything
from fxmem.planners.problem import Problem, reduce_program
from fxmem.planners.registry import Options, get_planner
from fxmem.schedule import Compute, Free, Machine, Offload, Recompute, Reload, Wait, simulate
from fxmem.schedule.simulate import Link

NAMES = ("revolve", "rotor", "offload-all", "offload-greedy", "offload-dp", "disk-revolve", "pofo")
HOST = Machine({"host": Link(200.0, 200.0)})


class Builder:
    """A training step by hand: ops in order, one storage each."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.sizes: list[int] = []

    def add(self, args: list[int], nbytes: int, backward: bool = False, **rest: object) -> int:
        index = len(self.ops)
        self.sizes.append(nbytes)
        fields = {"seconds": 1.0, "is_input": False} | rest
        region = "backward" if backward else "forward"
        self.ops.append(Op(index, f"op{index}", "f", region, tuple(args), (index,), **fields))  # type: ignore[arg-type]
        return index

    def program(self, loss: int, gradients: list[int]) -> Program:
        storages = tuple(Storage(i, size) for i, size in enumerate(self.sizes))
        return Program("hand", tuple(self.ops), storages, (loss,), tuple(gradients))


def residual_net(num_layers: int, with_mask: bool = True, with_dropout: bool = False) -> Program:
    """Layers x -> wide -> narrow -> x + narrow; a mask read by every layer; a gradient per layer that stays."""
    b = Builder()
    x = b.add([], 40, is_input=True, seconds=0.0)
    mask = b.add([x], 5) if with_mask else x
    layers = []
    for _ in range(num_layers):
        wide = b.add([x, mask], 160)
        kept = b.add([wide], 80, is_random=True, recomputable=False) if with_dropout else wide
        narrow = b.add([kept], 40, seconds=2.0)
        layers.append((x, wide, kept, narrow))
        x = b.add([x, narrow], 40)
    loss = b.add([x], 4)
    grad = b.add([], 4, backward=True, is_input=True, seconds=0.0)
    grad = b.add([grad, x], 40, backward=True)
    gradients = []
    for before, wide, kept, _ in reversed(layers):
        middle = b.add([grad, kept, wide], 160, backward=True, seconds=2.0)
        gradients.append(b.add([middle, before], 8, backward=True, seconds=2.0))
        grad = b.add([grad, middle], 40, backward=True)
    return b.program(loss, gradients)


def unplanned_peak(problem: Problem) -> int:
    actions = problem.actions(range(problem.num_kernels), problem.num_forward)
    return simulate(problem.program, actions).peak_bytes


def test_cuts_are_narrow_and_skips_are_pinned() -> None:
    problem = reduce_program(residual_net(8))
    cuts = choose_cuts(problem, 64)
    crossing = crossing_bytes(problem)
    assert len(cuts) >= 7
    assert all(crossing[cut] == 45 for cut in cuts)  # the residual stream and the mask
    blocks = split(problem, cuts)
    mask = next(int(s) for s in range(problem.num_storages) if problem.nbytes[s] == 5)
    assert mask in blocks.pinned
    assert not any(mask in part for part in blocks.boundary)
    assert sum(blocks.chain.u) + sum(blocks.chain.v) == pytest.approx(problem.baseline_s)
    covered = [k for part in (*blocks.forward, *reversed(blocks.backward)) for k in part]
    assert covered == list(range(problem.num_kernels))


def test_saving_everything_is_the_captured_step() -> None:
    for with_dropout in (False, True):
        problem = reduce_program(residual_net(6, with_dropout=with_dropout))
        blocks = split(problem, choose_cuts(problem, 16))
        actions = program_actions(blocks, compute_actions(save_everything(blocks.chain)))
        assert simulate(problem.program, actions).peak_bytes == unplanned_peak(problem)
        assert not any(isinstance(action, Recompute) for action in actions)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_dropout", [False, True])
def test_plans_hold_their_budget_or_say_so(name: str, with_dropout: bool) -> None:
    problem = reduce_program(residual_net(8, with_dropout=with_dropout))
    full, options = unplanned_peak(problem), Options(tiers=("host",), machine=HOST)
    with pytest.raises(BudgetInfeasible) as caught:
        get_planner(name)(problem, full // 20, options)
    least = caught.value.min_bytes
    for budget in (full, int(0.8 * full), max(least, int(0.6 * full))):
        solution = get_planner(name)(problem, budget, options)
        result = simulate(problem.program, solution.actions, HOST)
        assert result.peak_bytes <= budget
        counts = Counter(type(action) for action in solution.actions)
        assert counts[Compute] == problem.num_kernels
        assert counts[Offload] == counts[Free] == counts[Reload] == counts[Wait]
        assert budget < full or result.seconds == pytest.approx(problem.baseline_s)


def test_rotor_beats_revolve_and_pofo_beats_rotor_and_offload() -> None:
    problem = reduce_program(residual_net(10))
    budget, options = int(0.6 * unplanned_peak(problem)), Options(tiers=("host",), machine=HOST)

    def seconds(name: str) -> float:
        return simulate(problem.program, get_planner(name)(problem, budget, options).actions, HOST).seconds

    assert seconds("rotor") <= seconds("revolve")
    assert seconds("pofo") <= min(seconds("rotor"), seconds("offload-dp"))


def test_random_ops_never_run_twice() -> None:
    problem = reduce_program(residual_net(8, with_dropout=True))
    actions = get_planner("rotor")(problem, int(0.75 * unplanned_peak(problem)), Options()).actions
    again = {action.op for action in actions if isinstance(action, Recompute)}
    assert again
    assert not any(problem.program.ops[op].is_random for op in again)


def test_moving_needs_a_tier() -> None:
    problem = reduce_program(residual_net(3))
    with pytest.raises(OptionError, match="name a tier"):
        get_planner("offload-dp")(problem, 100, Options())


def test_a_chain_that_does_not_fit_its_own_room_in_whole_slots() -> None:
    chain = Chain(u=(1.0,), v=(1.0,), a=(7, 500), abar=(500,), wb=(1,), g=(509, 3))
    blocks: Any = SimpleNamespace(chain=chain)
    knob, least, most = rotor_knob(blocks)
    assert least > most
    assert knob(most) is None
