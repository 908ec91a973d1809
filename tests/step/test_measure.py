"""Measurement: allocator truth on the CPU, nested and interrupted traces, which tensors a callable holds."""

import functools
from typing import Any

import pytest
import torch
from planned import planned
from random_plans import full_plan, random_plan
from torch import nn

from fxmem import compat
from fxmem.errors import FxmemError
from fxmem.step.held_tensors import reachable_tensors
from fxmem.step.measurement import Measurement, MemoryTrace, _CpuLog, mark, measure, paused

KIB = 1024


def floats(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes // 4)


def test_peak_counts_what_stands_at_once_not_what_was_allocated() -> None:
    def work() -> None:
        one = floats(64 * KIB)
        del one
        two = floats(32 * KIB)
        three = floats(16 * KIB)
        del two, three

    assert measure(work).peak_bytes == 64 * KIB


def test_tensors_that_the_callable_holds_count_and_others_do_not() -> None:
    held, other = floats(64 * KIB), floats(1024 * KIB)
    views = [held.view(2, -1), held[4:]]
    result = measure(lambda: views[0].sum().item())
    assert 64 * KIB <= result.peak_bytes < 65 * KIB
    assert other.numel()
    assert str(result).startswith("peak 64.0")


def test_what_dies_within_gives_its_bytes_back() -> None:
    weight = nn.Parameter(floats(64 * KIB))

    def step() -> None:
        weight.grad = None
        (weight * 2).sum().backward()

    step()
    first = measure(step).peak_bytes
    assert first < 64 * KIB * 3.5  # weight, product or its gradient, gradient: never the old gradient as well
    weight.grad = None
    assert measure(step).peak_bytes == first


def test_measurements_nest() -> None:
    inner: list[Measurement] = []

    def outside() -> None:
        kept = floats(32 * KIB)
        inner.append(measure(lambda: floats(64 * KIB)))
        del kept
        floats(16 * KIB)

    assert measure(outside).peak_bytes == 96 * KIB
    assert inner[0].peak_bytes == 64 * KIB


def test_memory_freed_in_an_inner_measurement_is_known_to_the_outer_one() -> None:
    def outside() -> None:
        box = [floats(64 * KIB)]
        measure(box.clear)
        floats(32 * KIB)

    assert measure(outside).peak_bytes == 64 * KIB


def test_inside_another_profiler_it_refuses_and_leaves_that_one_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        with pytest.raises(FxmemError, match="another profiler"):
            measure(lambda: floats(KIB))
        trace = MemoryTrace()
        assert not trace.begin()
        assert trace.end() is None
        assert compat.profiler_is_active()


def test_an_error_within_ends_the_profiler() -> None:
    def fail() -> None:
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        measure(fail)
    assert not compat.profiler_is_active()


def test_marks_divide_a_trace_and_other_owners_code_does_not_count() -> None:
    trace = MemoryTrace(owner=1)
    trace.begin()
    first = floats(16 * KIB)
    mark(1, "F+ 0")
    floats(64 * KIB)
    mark(2, "F+ 7")
    other = floats(256 * KIB)
    mark(2, "F- 7")
    mark(1, "F- 0")
    assert trace.end() == 80 * KIB
    assert [(m.key, m.level_bytes, m.peak_bytes) for m in trace.marks] == [
        ("F+ 0", 16 * KIB, 16 * KIB),
        ("F- 0", 16 * KIB, 80 * KIB),
    ]
    assert first.numel() < other.numel()


def test_what_is_paused_is_not_counted_and_may_profile() -> None:
    trace = MemoryTrace()
    trace.begin()
    with paused(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True):
        floats(64 * KIB)
    kept = floats(16 * KIB)
    assert trace.level()[0] == 16 * KIB == sum(trace.level()[1].values())
    assert trace.end() == 16 * KIB == kept.nbytes


def test_a_session_that_somebody_ended_gives_no_result() -> None:
    trace = MemoryTrace()
    trace.begin()
    compat.stop_memory_log()
    assert trace.end() is None
    assert not compat.profiler_is_active()


def test_traces_overlap_in_any_order() -> None:
    one, two = MemoryTrace(), MemoryTrace()
    one.begin()
    first = floats(16 * KIB)
    two.begin()
    second = floats(64 * KIB)
    del first
    assert one.end() == 80 * KIB
    third = floats(32 * KIB)
    assert two.end() == 96 * KIB
    assert second.numel() + third.numel() == 24 * KIB


SHARED = torch.ones(7)


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: torch.Tensor) -> None:
        self.model(x).sum().backward()
        self.optimizer.step()


def held(root: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in reachable_tensors(root)}


def test_everything_that_a_callable_holds_is_found() -> None:
    model = nn.Linear(3, 3)
    trainer, x = Trainer(model), torch.ones(1, 3)
    trainer.step(x)
    found = held(functools.partial(trainer.step, x))
    momentum = [state["momentum_buffer"] for state in trainer.optimizer.state.values()]
    expected = [*model.parameters(), *(p.grad for p in model.parameters()), *momentum, x]
    assert found == {t.untyped_storage().data_ptr() for t in expected}
    assert held(lambda: SHARED.sum()) == {SHARED.untyped_storage().data_ptr()}
    assert held(lambda y=x: y) == {x.untyped_storage().data_ptr()}
    assert held(lambda: len("SHARED")) == set()
    assert held([torch.ones(2, device="meta")]) == set()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.mse_loss(x, target)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_the_allocator_agrees_with_the_simulator(seed: int | None) -> None:
    model, args = Blocks(), (torch.randn(64, 32), torch.randn(64, 32))
    choose = full_plan if seed is None else lambda program: random_plan(program, seed, keep=0.2)
    plan = planned(model, choose, with_costs=True)
    plan.step(*args).backward()
    model.zero_grad()
    measured = measure(lambda: plan.step(*args).backward()).peak_bytes
    assert measured == pytest.approx(plan.peak_bytes[0], rel=1e-4)  # the incoming gradient of the loss: 4 bytes


def test_what_another_thread_released_stands_until_its_address_comes_again() -> None:
    log = _CpuLog([], None)
    log.feed([("", 8, 100), ("", 9, 100), ("", 8, 100)])
    assert (log.level, log.peak) == (200, 200)
    log.feed([("", 8, -100), ("", 9, -100)])
    assert log.level == 0


def test_what_dies_in_nested_measurements_dies_once_in_each() -> None:
    outer_only, both = [floats(64 * KIB)], [floats(32 * KIB)]
    inner: list[Measurement] = []

    def step() -> None:
        both.clear()
        floats(256 * KIB)

    def outer() -> None:
        inner.append(measure(step))
        outer_only.clear()
        floats(512 * KIB)

    assert measure(outer).peak_bytes == 512 * KIB
    assert inner[0].peak_bytes == 256 * KIB
