"""Stage costs against a walk through the stage's blocks, and the all-stages table against single stages."""

from __future__ import annotations

import numpy as np
import pytest

from fxmem.pipelining.chain import Chain, Cluster
from fxmem.pipelining.curves import Curves, StageTable
from fxmem.pipelining.evaluate import Evaluator, OneFOneBN, occupancy
from fxmem.pipelining.schedules import one_f_one_b_n
from tests.pipelining.chains import random_chain


def _walk(chain: Chain, i: int, j: int, levels: list[int]) -> tuple[float, float, float]:
    """Saved bytes, forward and backward transient of stage [i, j), from a running total over its blocks."""
    held = top = 0.0
    saved = [chain.blocks[b].options[level].saved_bytes for b, level in zip(range(i, j), levels, strict=True)]
    for b in range(i, j):
        block = chain.blocks[b]
        top = max(top, held + max(saved[b - i], block.forward_transient_bytes) + block.output_bytes)
        held += saved[b - i] + block.output_bytes
    total = held - chain.blocks[j - 1].output_bytes
    forward, backward, freed = top, -np.inf, 0.0
    for b in range(j - 1, i - 1, -1):
        block = chain.blocks[b]
        restored = block.options[0].saved_bytes - saved[b - i]
        gradient_in = chain.blocks[b - 1].output_bytes if b else 0.0
        gradient_out = block.output_bytes if b < j - 1 else 0.0
        output_gone = block.output_bytes if b < j - 1 else 0.0
        here = restored + block.backward_transient_bytes + gradient_out + gradient_in
        backward = max(backward, here - freed - output_gone)
        freed += saved[b - i] + output_gone
    return total, forward, backward


@pytest.mark.parametrize("seed", range(6))
def test_stage_bytes_equal_a_walk_through_the_blocks(seed: int) -> None:
    chain = random_chain(seed, 9)
    curves = Curves(chain)
    for i in range(9):
        for j in range(i + 1, 10):
            curve = curves.of(((i, j),))
            for state in range(0, curve.levels.shape[0], 3):
                expected = _walk(chain, i, j, curve.levels[state].tolist())
                found = (curve.saved_bytes, curve.forward_peak_bytes, curve.backward_peak_bytes)
                assert tuple(array[0, state] for array in found) == pytest.approx(expected)
            assert (np.diff(curve.extra_s[0]) >= 0).all()
            assert curve.extra_s[0, 0] == 0


@pytest.mark.parametrize("recompute", ["optimal", "none", "full"])
def test_table_agrees_with_single_stages(recompute: str) -> None:
    chain = random_chain(11, 8)
    cluster = Cluster(2, 150.0)
    evaluator = Evaluator(chain, cluster, recompute)  # type: ignore[arg-type]
    table = StageTable(evaluator.curves, cluster.memory_bytes, 0.0)
    finite = 0
    for in_flight in (1, 2, 4):
        rows = OneFOneBN([in_flight], 4).occupancy()[0]
        for i in range(1, 8):
            for j in range(i + 1, 9):
                curve = evaluator.curves.of(((i, j),))
                need = evaluator.need(curve, rows, 4)
                fitting = curve.extra_s[0][need <= cluster.memory_bytes]
                assert table.least(in_flight)[i, j] <= need.min() + 1e-9
                expected = table.extra(in_flight)[i, j]
                if len(fitting):
                    finite += 1
                    assert expected <= fitting.min() + 1e-9
    assert finite > 20


def test_occupancy_of_1f1b_n_is_its_vector() -> None:
    counts = [4, 2, 2, 1]
    made = occupancy(one_f_one_b_n(counts, 6))
    assert made == OneFOneBN(counts, 6).occupancy() or [max(r.held for r in rows) for rows in made] == [
        (n,) for n in counts
    ]
    for rows, n in zip(made, counts, strict=True):
        assert max(row.held[0] for row in rows if row.kind == "B") == n
        assert max(row.held[0] for row in rows if row.kind == "F") == n - 1
