"""Steps as loops run them: several sizes, calls in flight together, graph breaks, and what is measured when."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem import compat
from fxmem.planners.plan import make_plan
from fxmem.step.sampling import Sampling
from tests.models import Blocks, blocks, gradients

QUICK = {"solve_s": 0.3}


def run(step, args):
    step(*args).backward()


def peak_of(module, function):
    """What eager mode needs for one step, without gradients before."""
    function()
    module.zero_grad()
    measured = fxmem.measure(function).peak_bytes
    module.zero_grad()
    return measured


def check_steps(module, step, plain, budget, num_steps=4, num_over=0):
    """Each step's gradients are those of `plain`; all but the first `num_over` stay under `budget`."""
    plain()
    expected = gradients(module)
    peaks = []
    for _ in range(num_steps):
        peaks.append(fxmem.measure(step).peak_bytes)
        torch.testing.assert_close(gradients(module), expected, rtol=1e-5, atol=1e-7)
    assert max(peaks[num_over:]) <= budget, peaks
    return peaks


def test_another_size_is_an_alternative_and_the_second_one_makes_it_a_symbol():
    module, _ = blocks(num_blocks=2)
    batches = [tuple(torch.randn(rows, 32) for _ in range(2)) for rows in (96, 96, 64, 80, 72)]
    budget = int(0.8 * peak_of(module, lambda: run(module, batches[0])))
    step = fxmem.compile(module, budget=budget, **QUICK)
    for _ in range(2):
        for args in batches:
            run(module, args)
            expected = gradients(module)
            assert fxmem.measure(lambda args=args: run(step, args)).peak_bytes <= budget
            assert all(torch.equal(a, b) for a, b in zip(gradients(module), expected, strict=True))
    assert len(step.step._graphs) <= 2, "one compilation for the first size, one for all others"
    assert step.num_retries == 0


def test_two_calls_in_flight_share_the_budget():
    module, (x, y) = blocks(num_blocks=2, batch=128)

    def twice(model):
        (model(x, y) + model(x + 1, y)).backward()

    budget = int(0.75 * peak_of(module, lambda: twice(module)))
    step = fxmem.compile(module, budget=budget, **QUICK)
    check_steps(module, lambda: twice(step), lambda: twice(module), budget, num_over=1)
    assert len(step.plans) == 2
    assert step.plan.peak_bytes <= budget
    assert step.num_retries <= 1


def test_a_forward_that_is_thrown_away_is_no_part_of_later_steps():
    module, args = blocks(num_blocks=2, batch=128)
    budget = int(0.8 * peak_of(module, lambda: run(module, args)))
    step = fxmem.compile(module, budget=budget, **QUICK)
    for _ in range(3):
        step(*args)  # a metric, computed with gradients and dropped
        assert fxmem.measure(lambda: run(step, args)).peak_bytes <= budget
        module.zero_grad()
    assert step.num_retries == 0


class Broken(Blocks):
    """Breaks into two graphs at a call that nobody can trace."""

    def forward(self, x, y):
        x = x + self.blocks[0](x)
        x = x + self.blocks[1](x)
        torch.compiler.disable(print)(end="")
        for block in self.blocks[2:]:
            x = x + block(x)
        return F.mse_loss(x * self.scale, y)


@pytest.mark.slow
def test_graphs_of_a_broken_model_are_planned_as_one_problem():
    torch.manual_seed(0)
    module, args = Broken(), (torch.randn(128, 32), torch.randn(128, 32))
    budget = int(0.7 * peak_of(module, lambda: run(module, args)))
    step = fxmem.compile(module, budget=budget, **QUICK)
    peaks = check_steps(module, lambda: run(step, args), lambda: run(module, args), budget)
    assert step.plan.peak_bytes == peaks[-1], "what was measured beside the graphs is in the prediction"
    assert len(step.plans) == 2
    ahead = fxmem.plan(module, args, budget=budget, **QUICK)
    assert ahead.peak_bytes <= budget < ahead.baseline_peak_bytes
    assert ahead.extra_s > 0


class Hidden(Blocks):
    """All but the last block run where Dynamo doesn't look, before the only graph."""

    def forward(self, x, y):
        x = self.unseen(x)
        return F.mse_loss((x + self.blocks[-1](x)) * self.scale, y)

    @torch.compiler.disable
    def unseen(self, x):
        for block in self.blocks[:-1]:
            x = x + block(x)
        return x


def test_a_refusal_names_what_runs_before_the_first_graph():
    torch.manual_seed(0)
    module, args = Hidden(), (torch.randn(128, 32), torch.randn(128, 32))
    peak = peak_of(module, lambda: run(module, args))
    step = fxmem.compile(module, budget=int(0.75 * peak), **QUICK)

    def steps():
        for _ in range(6):
            run(step, args)

    with pytest.raises(fxmem.BudgetInfeasible, match=r"not planned: what runs before .*test_kinds.py:\d+, where torch"):
        steps()


def test_a_step_that_runs_its_own_backward_is_planned_and_uses_its_budget():
    module, args = blocks()

    def train(x, y):
        loss = module(x, y)
        loss.backward()
        return loss.detach()

    budget = int(0.75 * peak_of(module, lambda: train(*args)))
    step = fxmem.compile(train, budget, **QUICK)
    peaks = check_steps(module, lambda: step(*args), lambda: train(*args), budget)
    assert len(step.plans) == 1
    assert step.plan.peak_bytes == peaks[-1] > 0.9 * budget, "it was planned for less only until its end was seen"


class Forces(nn.Module):
    """An energy and its gradient, both in the loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.body(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return 0.1 * energy + force.square().sum()


def test_gradients_that_forward_asks_for_are_planned_with_it():
    torch.manual_seed(0)
    module, args = Forces(), (torch.randn(128, 32),)
    budget = int(0.8 * peak_of(module, lambda: run(module, args)))
    step = fxmem.compile(module, budget, **QUICK)
    check_steps(module, lambda: run(step, args), lambda: run(module, args), budget, num_steps=2)
    assert len(step.plans) == 1
    assert step.plan.peak_bytes <= budget
    step.eval()
    torch.testing.assert_close(step(*args), module(*args))


class Unread(Blocks):
    """What Dynamo can't read stands in the loop over the blocks: each block is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner(block) for block in self.blocks)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
            torch.compiler.disable(print)(end="")
        return F.mse_loss(x * self.scale, y)


class Inner(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


def test_a_fraction_is_of_the_whole_step_where_blocks_are_graphs_of_their_own():
    torch.manual_seed(0)
    module, args = Unread(), (torch.randn(256, 32), torch.randn(256, 32))
    peak = peak_of(module, lambda: run(module, args))
    step = fxmem.compile(module, 0.75, **QUICK)
    peaks = check_steps(module, lambda: run(step, args), lambda: run(module, args), int(0.77 * peak), num_over=1)
    assert len(step.plans) == 4
    assert step.step.measured_peak_bytes <= step.step.budget_bytes < int(0.77 * peak)
    assert peaks[-1] > 0.6 * peak, "the smallest plans were only the first step's"


def test_a_loss_outside_of_the_model_counts():
    module, (x, y) = blocks(num_blocks=2, batch=128)
    body = nn.Sequential(*module.blocks)

    def outside(model):
        F.cross_entropy(torch.cat([model(x)] * 4, 1), y.argmax(1)).backward()

    budget = int(0.85 * peak_of(body, lambda: outside(body)))
    step = fxmem.compile(body, budget=budget, **QUICK)
    target_bytes = y.nbytes  # which only the caller holds
    check_steps(body, lambda: outside(step), lambda: outside(body), budget + target_bytes, num_over=1)
    assert step.plan.peak_bytes <= budget


def test_a_fraction_is_one_of_the_first_steps_peak_in_bytes_from_then_on():
    module, _ = blocks(num_blocks=2)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    run(step, tuple(torch.randn(128, 32) for _ in range(2)))
    first = step.step.budget_bytes
    assert first == int(0.8 * step.plan.baseline_peak_bytes)
    module.zero_grad()
    run(step, tuple(torch.randn(64, 32) for _ in range(2)))
    assert step.step.budget_bytes == first
    assert step.plan.budget_bytes == first


def test_several_backwards_of_one_forward_are_held():
    module, (x, y) = blocks(num_blocks=2, batch=128)

    def three(model):
        loss = model(x, y)
        for last in (False, False, True):
            loss.backward(retain_graph=not last)

    budget = int(0.92 * peak_of(module, lambda: three(module)))
    step = fxmem.compile(module, budget=budget, **QUICK)
    check_steps(module, lambda: three(step), lambda: three(module), budget, num_over=1)


def pairs(share, together):
    """Two models, a function that takes a step of both, what stands in it, and `share` of its peak without a plan."""
    one, args = blocks(num_blocks=2, batch=128)
    two, _ = blocks(num_blocks=2, batch=128, seed=1)

    def step(first, second):
        if together:
            (first(*args) + second(*args)).backward()
        else:
            run(first, args)
            run(second, args)

    budget = int(share * peak_of(one, lambda: step(one, two)))
    two.zero_grad()
    return one, two, step, budget


@pytest.mark.parametrize("together", [True, False])
def test_models_that_train_in_one_loop_have_one_budget(together):
    """From the first step on if one is called while the other waits for its backward, from the second if in turns."""
    one, two, step, budget = pairs(0.8, together)
    step(one, two)
    expected = gradients(one), gradients(two)
    compiled = [fxmem.compile(module, budget=budget, **QUICK) for module in (one, two)]
    for number in range(3):
        one.zero_grad()
        two.zero_grad()
        peak_bytes = fxmem.measure(lambda: step(*compiled)).peak_bytes
        assert all(map(torch.equal, (*gradients(one), *gradients(two)), (*expected[0], *expected[1])))
        assert number == 0 or peak_bytes <= budget
    assert compiled[0].step is compiled[1].step
    assert compiled[0].step.measured_peak_bytes <= budget
    compiled[1].set_budget(2 * budget)
    assert compiled[0].step.budget_bytes == 2 * budget


def test_models_of_unlike_budgets_are_steps_of_their_own():
    one, two, step, budget = pairs(0.8, together=True)
    compiled = [fxmem.compile(module, budget=budget + i, **QUICK) for i, module in enumerate((one, two))]
    for _ in range(2):
        step(*compiled)
    assert compiled[0].step is not compiled[1].step


def test_models_that_train_on_threads_of_their_own_are_steps_of_their_own():
    one, two, _, budget = pairs(0.8, together=True)
    compiled = [fxmem.compile(module, budget=budget, **QUICK) for module in (one, two)]
    args = blocks(num_blocks=2, batch=128)[1]
    waiting = compiled[0](*args)
    for _ in range(2):
        thread = threading.Thread(target=run, args=(compiled[1], args))
        thread.start()
        thread.join()
    waiting.backward()
    assert compiled[0].step is not compiled[1].step


def test_a_model_that_runs_without_gradients_in_turns_stands_there_too():
    student, args = blocks(num_blocks=2, batch=128)
    teacher = blocks(num_blocks=6, batch=128, seed=1)[0].requires_grad_(False)

    def step(student, teacher):
        with torch.no_grad():
            teacher(*args)
        run(student, args)

    budget = int(0.9 * peak_of(student, lambda: step(student, teacher)))
    compiled = [fxmem.compile(module, budget=budget, **QUICK) for module in (student, teacher)]
    for number in range(3):
        student.zero_grad()
        peak_bytes = fxmem.measure(lambda: step(*compiled)).peak_bytes
        assert number == 0 or peak_bytes <= budget


def test_what_the_loop_keeps_of_a_step_stands_in_the_next_one():
    module, (x, y) = blocks(num_blocks=2, batch=128)

    def step(module):
        own = x.clone().requires_grad_()
        (towards,) = torch.autograd.grad(module(own, y), own)
        loss = module((own + 0.1 * towards.sign()).detach(), y)
        loss.backward()
        return towards, own, loss

    budget = int(0.8 * peak_of(module, lambda: step(module)))
    compiled = fxmem.compile(module, budget=budget, **QUICK)
    for number in range(4):
        module.zero_grad()
        peak_bytes = fxmem.measure(lambda: step(compiled)).peak_bytes
        assert number < 2 or peak_bytes <= budget


def test_an_error_names_what_the_loop_keeps(monkeypatch):
    monkeypatch.setattr(Sampling, "is_due", True)
    body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
    x, held = torch.randn(512, 32), []
    compiled = fxmem.compile(body, budget=int(1.1 * peak_of(body, lambda: body(x).square().sum().backward())), **QUICK)

    def loop():
        for _ in range(20):
            held.append(compiled(x))
            held[-1].square().sum().backward()

    with pytest.raises(fxmem.BudgetInfeasible, match="KiB are what the caller holds of earlier calls' results"):
        loop()


def test_equal_models_that_torch_compile_gives_one_code_do_not_count_for_each_other():
    modules, args = [blocks(num_blocks=2, batch=128, seed=seed)[0] for seed in (0, 1)], blocks(batch=128)[1]
    budget = int(0.8 * peak_of(modules[0], lambda: run(modules[0], args)))
    compiled = [torch.compile(m, backend="fxmem", options={"budget": budget, **QUICK}) for m in modules]
    for _ in range(3):
        peaks = [fxmem.measure(lambda step=step: run(step, args)).peak_bytes for step in compiled]
        assert max(peaks) <= budget
        for module in modules:
            module.zero_grad()
    step = fxmem.step_of(compiled[1])
    assert step is fxmem.step_of(compiled[0])
    assert step.num_retries == 0
    assert step.plan.peak_bytes <= budget


def test_a_graph_is_planned_again_from_its_plan_before(monkeypatch):
    starts = []

    def planned(program, budget, planner, options):
        starts.append(options.start)
        return make_plan(program, budget, planner, options)

    monkeypatch.setattr("fxmem.step.graph_plan.make_plan", planned)
    module, _ = blocks(num_blocks=2)
    step = fxmem.compile(module, "min", dynamic=True, fission="off", **QUICK)
    for rows in (48, 96):
        run(step, tuple(torch.randn(rows, 32) for _ in range(2)))
    first, *others = starts
    assert first is None
    assert others
    assert all(start is not None for start in others)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.mode = ""

    def forward(self, x):
        self.mode += "x"  # a new constant each time: another graph each time
        return self.linear(x).mul(len(self.mode)).sum()


def test_what_changes_every_step_is_named_before_it_would_run_without_a_plan(monkeypatch):
    for module in (compat, compat.dynamo):
        monkeypatch.setattr(module, "RECOMPILE_LIMIT", 9)
    step = fxmem.compile(Changing(), budget=2**20)
    for _ in range(9):
        run(step, (torch.randn(4, 8),))
    with pytest.raises(fxmem.CaptureError, match="was compiled 9 times"):
        step(torch.randn(4, 8))


def test_torch_compile_runs_nothing_without_a_plan_either(monkeypatch):
    monkeypatch.setattr(compat.dynamo, "RECOMPILE_LIMIT", 9)
    module = Changing()
    module.compile(backend="fxmem", options={"budget": 2**20})
    for _ in range(9):
        run(module, (torch.randn(4, 8),))
    with pytest.raises(compat.FailOnRecompileLimitHit):
        module(torch.randn(4, 8))


class Adapted(nn.Module):
    """A frozen linear layer and a trainable one of low rank beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_parameters_that_come_after_a_step_count_and_old_ones_are_let_go():
    module, args = blocks(num_blocks=2, batch=128)
    step = fxmem.compile(module, budget="4MiB", **QUICK)
    run(step, args)
    gone = weakref.ref(module.blocks[0][3].weight)
    module.zero_grad()
    module.blocks[0][3] = nn.Linear(128, 32)
    for block in module.blocks:
        block[1] = Adapted(block[1])
    gc.collect()
    for _ in range(2):  # gradients add up: those that exist count
        run(step, args)
    assert {id(p) for p in step.step.parameters} == {id(p) for p in module.parameters()}
    assert gone() is None
    existing = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
    assert step.step._standing.gradient_bytes == existing


def test_another_plan_of_a_graph_is_compiled_without_tracing_again(monkeypatch):
    traced, again = [], []
    compiled = compat.AotTrace.compiled
    monkeypatch.setattr(compat.AotTrace, "compiled", lambda *args: (again.append(1), compiled(*args))[1])
    stage = compat.aot.aot.aot_stage1_graph_capture
    monkeypatch.setattr(compat.aot.aot, "aot_stage1_graph_capture", lambda *args: (traced.append(1), stage(*args))[1])
    module, _ = blocks(num_blocks=2, dropout=0.1)
    batches = [tuple(torch.randn(rows, 32) for _ in range(2)) for rows in (64, 48, 96, 128)]
    budget = int(0.8 * peak_of(module, lambda: run(module, batches[-1])))
    step = fxmem.compile(module, budget=budget, **QUICK)
    for args in (*batches, *batches):
        torch.manual_seed(0)
        run(step, args)
        found = gradients(module)
        torch.manual_seed(0)
        run(module, args)
        torch.testing.assert_close(found, gradients(module), rtol=1e-5, atol=1e-7)
    assert again
    assert len(traced) <= 2, "once for the first size, once for all others"


def test_batches_that_are_slices_count_with_all_that_they_are_slices_of():
    """Copies and slices of the same shape take turns; what stands behind a slice is more."""
    torch.manual_seed(0)
    module = Blocks(num_blocks=4)
    data = torch.randn(1024, 32)
    order = torch.randperm(1024)

    def batches():
        for i in range(0, 1024, 256):
            yield data[i : i + 256], data[i : i + 256]
            yield data[order[i : i + 256]], data[order[i : i + 256]]

    peak_bytes = peak_of(module, lambda: module(data[:256], data[:256]).backward())
    budget = int(0.7 * peak_bytes)
    step = fxmem.compile(module, budget=budget, **QUICK)
    for args in batches():
        assert fxmem.measure(lambda args=args: run(step, args)).peak_bytes <= budget
        module.zero_grad()
    assert step.num_retries == 0
