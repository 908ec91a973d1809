"""When a step is measured, what a measurement verifies, and that none is left open."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F

import fxmem
from fxmem import compat
from fxmem.step.graph import Graph
from fxmem.step.measurement import MemoryTrace
from fxmem.step.sampling import Sampling
from tests.models import blocks, gradients
from tests.step.test_kinds import QUICK, Broken, peak_of, run


def test_a_lost_measurement_verifies_nothing():
    module, args = blocks(num_blocks=2, batch=128)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    loss = step(*args)
    compat.stop_memory_log()  # as a profiler of somebody else's would
    loss.backward()
    module.zero_grad()
    assert step.step.measured_peak_bytes is None
    run(step, args)
    assert step.step.measured_peak_bytes == step.plan.peak_bytes


def test_what_compiling_leaves_standing_is_no_excess_of_the_step(monkeypatch):
    left = []
    made = Graph.compile
    monkeypatch.setattr(Graph, "compile", lambda *args: (made(*args), left.append(torch.zeros(2)))[0])
    module, args = blocks(num_blocks=2, batch=128)
    step = fxmem.compile(module, budget=1.0, planner="none")
    for _ in range(2):
        run(step, args)
        module.zero_grad()
    assert left
    assert step.step.measured_peak_bytes == step.plan.peak_bytes == step.step.budget_bytes
    assert step.num_retries == 0


class Leaky(Broken):
    """Between its graphs runs code that later needs more than it did when the step was planned."""

    more_bytes = 0

    def forward(self, x, y):
        x = x + self.blocks[0](x)
        self.keep()
        return F.mse_loss((x + self.blocks[1](x)) * self.scale, y)

    @torch.compiler.disable
    def keep(self):
        self.kept = torch.ones(self.more_bytes // 4)


def test_later_steps_are_held_too(monkeypatch):
    torch.manual_seed(0)
    module, args = Leaky(2), (torch.randn(128, 32), torch.randn(128, 32))
    budget = peak_of(module, lambda: run(module, args))
    step = fxmem.compile(module, budget=budget, **QUICK)
    for _ in range(3):
        run(step, args)
        module.zero_grad()
    assert step.num_retries == 0
    monkeypatch.setattr(Sampling, "is_due", True)  # it is after a while: see the next test
    module.more_bytes = 40_000
    run(step, args)
    module.zero_grad()
    assert step.plan.peak_bytes
    assert step.num_retries == 1
    assert fxmem.measure(lambda: run(step, args)).peak_bytes <= budget


def test_measuring_known_steps_takes_a_small_share_of_the_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fxmem.step.sampling.time.perf_counter", lambda: clock[0])
    sampling, measured = Sampling(), 0
    for number in range(2000):
        is_measured = number == 0 or sampling.is_due
        measured += is_measured
        sampling.begin(is_measured)
        clock[0] += 1.3 if is_measured else 1.0
        sampling.end()
    assert measured > 10
    assert 0.3 * measured <= 0.01 * 2000


def test_a_backward_that_never_comes_leaves_no_profiler_behind():
    module, args = blocks(num_blocks=2, batch=128)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    loss = step(*args)
    assert compat.profiler_is_active()
    del loss
    gc.collect()
    assert not compat.profiler_is_active()


@pytest.mark.parametrize("view", [lambda x: x.narrow(-1, 0, 1).reshape(-1), lambda x: x.unbind(-1)[0]])
def test_a_call_whose_output_is_an_input_leaves_no_profiler_behind(view):
    """Torch makes views of inputs outside of the graph, of which no backward will come; or there is nothing in it."""
    x = torch.randn(4, 3).t().requires_grad_()
    out = fxmem.compile(lambda x, y: (view(x), y + y)[0], budget="min")(x, torch.ones(()))
    out.sum().backward()
    del out
    assert not compat.profiler_is_active()
    assert torch.equal(x.grad[:, 0], torch.ones(3))


def test_a_backward_on_another_thread_verifies_nothing_and_leaves_no_profiler():
    module, args = blocks(num_blocks=2, batch=128)
    run(module, args)
    expected = gradients(module)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    for _ in range(2):
        thread = threading.Thread(target=step(*args).backward)
        thread.start()
        thread.join()
        assert all(torch.equal(a, b) for a, b in zip(gradients(module), expected, strict=True))
    assert step.step.measured_peak_bytes is None
    run(step, args)
    assert step.step.measured_peak_bytes == step.plan.peak_bytes
    assert not compat.profiler_is_active()


def test_a_backward_that_fails_verifies_nothing():
    module, args = blocks(num_blocks=2, batch=128)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    hook = module.blocks[0][1].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(step, args)
    hook.remove()
    module.zero_grad()
    run(step, args)
    assert step.step.measured_peak_bytes == step.plan.peak_bytes


def test_levels_are_flat_over_many_steps_of_which_some_fail():
    module, args = blocks(num_blocks=2, batch=64)
    step = fxmem.compile(module, budget=0.8, **QUICK)

    def one(number):
        loss = step(*args)
        if number % 11 == 0:
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        elif number % 7:
            loss.backward()
        module.zero_grad()

    for number in range(30):
        one(number)
    trace = MemoryTrace()
    trace.begin()
    for number in range(154):  # twice 7 x 11
        one(number)
    gc.collect()
    assert trace.level()[0] == 0, "bytes that nobody gave back"
    trace.end()
    assert step.num_retries == 0


def test_somebody_elses_profiler_sees_the_whole_first_step():
    module, args = blocks(num_blocks=2, batch=128)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        run(step, args)
    assert any("addmm" in event.key for event in profile.key_averages())
    assert step.step.measured_peak_bytes is None
    module.zero_grad()
    run(step, args)
    assert step.step.measured_peak_bytes == step.plan.peak_bytes
