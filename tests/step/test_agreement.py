"""Ranks plan alike though a process group's threads let go of buffers sooner or later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fxmem import compat
from fxmem.ir.program import Op, Program, Storage
from fxmem.step.agreement import Agreement
from fxmem.step.episode import Measured
from fxmem.step.levels import Level

BUFFER = 100


def measured(peak_bytes, start=0):
    return Measured(start + peak_bytes, {("forward", 7): Level(start, start, start + peak_bytes, start + 1)})


def episode(start_bytes=0, is_collective=True):
    op = Op(0, "op", "all_reduce", "forward", (), (0,), is_collective=is_collective, recomputable=False)
    program = Program("p", (op,), (Storage(0, BUFFER),), (), ())
    call = SimpleNamespace(key=(3, ("s0", 8)))
    return SimpleNamespace(start_bytes=start_bytes, plans=[SimpleNamespace(program=program)], calls=[call])


@pytest.fixture
def ranks(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(compat, "default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    return Agreement(0), Agreement(0)


def test_the_rank_that_comes_first_measures_for_all(ranks):
    first, second = ranks
    for own, other in ((1000, 1000 + BUFFER), (1000 + 2 * BUFFER, 1000)):  # noise of either
        assert first.on(episode(), measured(own), []) == measured(own)
        assert second.on(episode(), measured(other), []) == measured(own)


def test_what_stands_at_the_start_is_each_ranks_own(ranks):
    first, second = ranks
    first.on(episode(start_bytes=50), measured(1000, start=50), [])
    assert second.on(episode(start_bytes=90), measured(1000 + BUFFER, start=90), []) == measured(1000, start=90)


def test_a_rank_that_needs_more_keeps_what_it_measured(ranks):
    first, second = ranks
    first.on(episode(), measured(1000), [])
    assert second.on(episode(), measured(1001 + 2 * BUFFER), []) == measured(1001 + 2 * BUFFER)


def test_where_nothing_is_collective_nobody_is_asked(ranks, monkeypatch):
    monkeypatch.setattr(compat, "default_store", lambda: pytest.fail("asked"))
    assert ranks[0].on(episode(is_collective=False), measured(1000), []) == measured(1000)
