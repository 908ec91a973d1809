"""Chain planners against brute force, closed forms, peers and the exact chain simulator."""

from __future__ import annotations

import math
import random

import pytest

from bench.chains import peer_rows, random_cases
from fxmem.planners.chains import CHAIN_PLANNERS, BlockOption, Chain, ChainError, homogeneous, judge, simulate
from fxmem.planners.chains.brute import best_joint, best_offload, persistent_s
from fxmem.planners.chains.offload import lower_bound_s
from fxmem.planners.chains.place import place, place_at_once
from fxmem.planners.chains.revolve import disk_revolve_tree, disk_table, extra_forwards, opt_table, revolve_tree
from fxmem.planners.chains.rotor import rotor_tree
from fxmem.planners.chains.simulate import Action, Backward, Forward, Free, Item, Keep, Offload, Reload, Wait
from fxmem.planners.chains.tree import compute_actions, promised_peak, promised_s, save_everything


def options_chain(rng: random.Random, num_blocks: int) -> Chain:
    """An integer chain with up to two further saved sets per block."""
    a = [rng.randint(1, 6) for _ in range(num_blocks + 1)]

    def column(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randint(low, high) for _ in range(num_blocks))

    return Chain(
        tuple(map(float, column(1, 9))),
        tuple(map(float, column(1, 15))),
        tuple(a),
        tuple(a[i + 1] + rng.randint(0, 12) for i in range(num_blocks)),
        column(0, 4),
        column(0, 4),
        base=rng.randint(0, 3),
        more=tuple(
            tuple(
                BlockOption(float(rng.randint(1, 9)), 20.0, a[i + 1] + rng.randint(0, 6))
                for _ in range(rng.randint(0, 2))
            )
            for i in range(num_blocks)
        ),
    )


def test_revolve_equals_closed_form_and_its_schedule() -> None:
    table = opt_table(69, 8, 1.0, 1.0)
    for slots in range(1, 9):
        for steps in range(70):
            assert table[slots, steps] - (steps + 1) == extra_forwards(steps + 1, slots)
    for num_blocks, slots in ((1, 1), (2, 1), (7, 2), (30, 3), (64, 8)):
        run = simulate(homogeneous(num_blocks), compute_actions(revolve_tree(0, num_blocks - 1, slots, table, 1.0)))
        assert run.num_forwards == num_blocks + extra_forwards(num_blocks, slots)
        assert run.peak_bytes <= slots + 4  # the input is a slot; output, saved set and two gradients come and go


def test_peers_agree() -> None:
    rows = list(peer_rows())
    assert rows[0]["peer"] == "closed form"
    for row in rows:
        assert "skipped" in row or row["equal"] == row["cases"] == 552, row


@pytest.mark.parametrize(("copy_s", "slots"), [(0.5, 1), (2.0, 2), (5.0, 3)])
def test_disk_revolve_schedule_keeps_its_promise(copy_s: float, slots: int) -> None:
    for num_blocks in (1, 2, 10, 40):
        memory = opt_table(num_blocks - 1, slots, 1.0, 1.0)
        two = disk_revolve_tree(memory, 1.0, 1.0, copy_s, copy_s)
        chain = homogeneous(num_blocks, size=2, beta=2 / copy_s)
        run = simulate(chain, place_at_once(chain, compute_actions(two.tree), [Item("a", b) for b in two.on_disk]))
        promised = disk_table(memory, 1.0, 1.0, copy_s, copy_s)[-1] + num_blocks  # saving forwards are not in the table
        assert run.time_s <= promised + 1e-9
        assert run.time_s >= promised - 2 * copy_s * len(two.on_disk) - 1e-9


def test_rotor_equals_search_over_persistent_schedules() -> None:
    rng, feasible = random.Random(1), 0
    for _ in range(60):
        chain = options_chain(rng, rng.randint(1, 4))
        full = simulate(chain, compute_actions(save_everything(chain))).peak_bytes
        budget = rng.randint(full // 2, full)
        best_s, tree = persistent_s(chain, budget), rotor_tree(chain, budget, budget + 1)
        assert (tree is None) == (best_s == math.inf)
        if tree is not None:
            feasible += 1
            assert promised_s(chain, tree) == pytest.approx(best_s)
    assert feasible > 20


def test_rotor_promises_the_simulated_peak() -> None:
    rng = random.Random(2)
    for _ in range(60):
        chain = options_chain(rng, rng.randint(1, 12))
        scale = rng.choice([1, 1009])
        a, abar = (tuple(x * scale for x in xs) for xs in (chain.a, chain.abar))
        chain = Chain(chain.u, chain.v, a, abar, chain.wf, chain.wb)
        full = simulate(chain, compute_actions(save_everything(chain))).peak_bytes
        budget = rng.randint(full // 2, full)
        tree = rotor_tree(chain, budget, 100)
        if tree is not None:
            run = simulate(chain, compute_actions(tree))
            assert run.peak_bytes == promised_peak(chain, tree) <= budget
            assert run.time_s == pytest.approx(promised_s(chain, tree))


def test_offload_dp_is_near_the_best_selection_and_above_its_bound() -> None:
    ratios = []
    for chain, budget in random_cases(3, 60, 3, 7, 0.6):
        best_s = best_offload(chain, budget)
        plan = judge("offload-dp", chain, budget)
        assert (plan is None) == (best_s == math.inf)
        if plan is not None:
            assert lower_bound_s(chain, budget) <= best_s + 1e-9
            ratios.append(plan.time_s / best_s)
    assert len(ratios) > 30
    assert sum(ratios) / len(ratios) < 1.01


def test_pofo_is_near_brute_force() -> None:
    ratios = []
    for chain, budget in random_cases(4, 25, 3, 4, 0.5):
        best_s, plan = best_joint(chain, budget), judge("pofo", chain, budget)
        assert (plan is None) == (best_s == math.inf)
        if plan is not None:
            ratios.append(plan.time_s / best_s)
    assert len(ratios) > 15
    assert sum(ratios) / len(ratios) < 1.005


def test_pofo_is_never_worse_than_the_others() -> None:
    for chain, budget in random_cases(5, 6, 6, 9, 0.4):
        plans = {name: judge(name, chain, budget) for name in CHAIN_PLANNERS}
        best = plans["pofo"]
        for plan in plans.values():
            if plan is not None:
                assert plan.peak_bytes <= budget
                assert best is not None
                assert best.time_s <= plan.time_s + 1e-9


def test_infinite_link_makes_offload_free_and_no_link_useless() -> None:
    chain = Chain((1.0,) * 6, (2.0,) * 6, (1,) * 7, (10,) * 6, beta=1e9)
    moved, kept = judge("offload-dp", chain, 45), judge("save-all", chain, 45)
    assert kept is None
    assert moved is not None
    assert moved.time_s == pytest.approx(18.0, abs=1e-6)


def test_simulator_refuses_what_is_not_there() -> None:
    chain = homogeneous(2)
    save: list[Action] = [Forward(0, Keep.ALL), Forward(1, Keep.ALL)]
    item = Item("abar", 0)
    with pytest.raises(ChainError, match="not on the device"):
        simulate(chain, [Forward(1, Keep.ALL)])
    with pytest.raises(ChainError, match="what the block saved is not on the device"):
        simulate(chain, [Forward(0, Keep.INPUT), Backward(1)])
    with pytest.raises(ChainError, match="has no copy"):
        simulate(chain, [*save, Free(item)])
    with pytest.raises(ChainError, match="not been given up"):
        simulate(chain, [*save, Offload(item), Reload(item)])
    with pytest.raises(ChainError, match="before its reload was waited for"):
        simulate(chain, [*save, Offload(item), Free(item), Reload(item), Backward(1)])
    with pytest.raises(ChainError, match="ends before the backward of block 0"):
        simulate(chain, [*save, Backward(1)])
    with pytest.raises(ChainError, match="unknown chain planner 'x'"):
        judge("x", chain, 10)


def test_simulator_counts_bytes_and_stalls() -> None:
    chain = Chain((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1, 1, 1, 1), (4, 4, 4), beta=2.0, g=(0, 1, 1, 1))
    item = Item("abar", 0)
    program: list[Action] = [
        Forward(0, Keep.ALL),
        Offload(item),  # 1 s .. 3 s
        Forward(1, Keep.ALL),
        Free(item),  # waits from 2 s to 3 s
        Forward(2, Keep.ALL),
        Backward(2),
        Reload(item),  # 5 s .. 7 s
        Wait(item),
        Backward(1),
        Backward(0),
    ]
    run = simulate(chain, program)
    assert (run.time_s, run.stall_s, run.moved_bytes) == (9.0, 3.0, 8)
    assert run.during == [5, 9, 9, 11, 11, 6]
    assert run.peak_bytes == 11


def test_place_moves_only_what_it_must() -> None:
    chain = Chain((1.0,) * 4, (1.0,) * 4, (1,) * 5, (10,) * 4, beta=10.0)
    compute = compute_actions(save_everything(chain))
    full = simulate(chain, compute).peak_bytes
    everything = [Item("abar", i) for i in range(3)]
    roomy, tight = place(chain, compute, everything, full), place(chain, compute, everything, full - 1)
    assert roomy == list(compute)
    assert tight is not None
    assert [step.item for step in tight if isinstance(step, Free)] == [Item("abar", 0)]
    assert simulate(chain, tight).peak_bytes <= full - 1


def test_chain_checks_its_sizes() -> None:
    with pytest.raises(ChainError, match="needs 3 entries in 'a'"):
        Chain((1.0, 1.0), (1.0, 1.0), (1, 1), (1, 1))
    with pytest.raises(ChainError, match="less than its own output"):
        Chain((1.0,), (1.0,), (1, 3), (2,))
