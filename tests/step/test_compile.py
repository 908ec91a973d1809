"""`fxmem.compile` end to end: budget kept by measurement, gradients equal, the module still itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from tests.models import Blocks, Net, blocks, gradients


def run(step, args):
    step(*args).backward()


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def compiled():
    module, args = blocks()
    step = fxmem.compile(module)
    run(step, args)
    return module, step, args, gradients(module)


@pytest.mark.parametrize("budget", [0.9, 0.7, "min"])
def test_measured_peak_is_predicted_and_under_the_budget(compiled, budget):
    module, step, args, expected = compiled
    step.set_budget(budget)
    run(step, args)
    assert equal(gradients(module), expected)
    measured = fxmem.measure(lambda: run(step, args)).peak_bytes
    module.zero_grad()
    plan = step.plan
    assert measured == plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert plan.extra_s > 0
    assert 0 <= plan.lower_bound_s <= plan.extra_s
    assert step.num_retries == 0


def test_unplanned_gradients_are_eagers(compiled):
    module, _, args, expected = compiled
    run(module, args)
    assert equal(gradients(module), expected)


@pytest.mark.slow
def test_infeasible_budget_names_one_that_works(compiled):
    module, step, args, expected = compiled
    step.set_budget(1000)
    with pytest.raises(fxmem.BudgetInfeasible, match="smallest feasible") as caught:
        run(step, args)
    assert caught.value.at_peak
    step.set_budget(caught.value.min_bytes)
    run(step, args)
    assert equal(gradients(module), expected)
    assert fxmem.measure(lambda: run(step, args)).peak_bytes <= caught.value.min_bytes
    module.zero_grad()


def test_no_budget_changes_nothing(compiled):
    module, step, args, _ = compiled
    step.set_budget(None)
    run(step, args)
    assert step.plan.extra_s == 0
    assert step.plan.peak_bytes == step.plan.baseline_peak_bytes
    module.zero_grad()


@pytest.mark.slow
def test_existing_gradients_count(compiled):
    """Accumulating steps hold old and new gradients at once: planned again when the old ones appear."""
    module, step, args, expected = compiled
    step.set_budget(0.9)
    run(step, args)
    run(step, args)
    accumulated = [p.grad.clone() for p in module.parameters()]
    assert all(torch.allclose(a, 2 * b) for a, b in zip(accumulated, expected, strict=True))
    measured = fxmem.measure(lambda: run(step, args)).peak_bytes
    module.zero_grad()
    assert measured <= step.plan.budget_bytes
    assert step.plan.program.extra_resident_bytes >= sum(g.nbytes for g in expected)


def test_second_backward_of_one_forward(compiled):
    module, step, args, expected = compiled
    step.set_budget(0.8)
    loss = step(*args)
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(torch.equal(a, 2 * b) for a, b in zip(gradients(module), expected, strict=True))


def test_module_stays_itself():
    module, args = blocks()
    step = fxmem.compile(module, budget=0.8)
    assert list(step.state_dict()) == list(module.state_dict())
    assert [name for name, _ in step.named_parameters()] == [name for name, _ in module.named_parameters()]
    step.eval()
    assert not module.training
    assert not module.blocks[0].training
    step.train()
    assert module.blocks[0].training
    assert step.blocks is module.blocks
    state = {name: torch.zeros_like(value) for name, value in module.state_dict().items()}
    step.load_state_dict(state)
    assert float(module.blocks[0][1].weight.detach().abs().sum()) == 0
    with torch.no_grad():
        assert torch.equal(step(*args), module(*args))
    assert not step.plans


def train(module, step, args, num_steps):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.manual_seed(1)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = step(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_dropout_is_never_drawn_again():
    module, args = blocks(dropout=0.3)
    start = copy.deepcopy(module.state_dict())
    step = fxmem.compile(module)
    expected = train(module, step, args, 5)
    module.load_state_dict(start)
    step.set_budget("min")
    assert train(module, step, args, 5) == expected
    assert step.plan.extra_s > 0


def test_batch_statistics_are_updated_once_a_step():
    torch.manual_seed(0)
    module = Net()
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(5, (8,))
    reference = copy.deepcopy(module)
    F.cross_entropy(reference(images), labels).backward()
    step = fxmem.compile(module, budget=0.75, loss_fn=F.cross_entropy)
    step(images, labels).backward()
    for name, value in module.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name]), name
    assert equal(gradients(module), gradients(reference))
    assert step.plan.extra_s > 0


@pytest.mark.slow
def test_function_with_loss_outside_of_the_graph():
    """Tangents of large outputs stand for the whole backward; the measured step is still under the budget."""
    module, (x, y) = blocks()
    body = nn.Sequential(*module.blocks)
    F.mse_loss(body(x), y).backward()
    expected = gradients(body)
    forward = fxmem.compile(lambda value: body(value), budget=0.8)
    F.mse_loss(forward(x), y).backward()
    assert equal(gradients(body), expected)
    assert forward.step.measured_peak_bytes <= forward.plan.budget_bytes


def test_graph_break_is_still_one_step():
    class Broken(Blocks):
        def forward(self, x, y):
            x = x + self.blocks[0](x)
            x = x + self.blocks[1](x)
            torch.compiler.graph_break() if hasattr(torch.compiler, "graph_break") else print(end="")
            x = x + self.blocks[2](x)
            return F.mse_loss((x + self.blocks[3](x)) * self.scale, y)

    torch.manual_seed(0)
    module = Broken()
    args = (torch.randn(256, 32), torch.randn(256, 32))
    run(module, args)
    expected = gradients(module)
    step = fxmem.compile(module)
    run(step, args)
    module.zero_grad()
    peak = fxmem.measure(lambda: run(step, args)).peak_bytes
    module.zero_grad()
    step = fxmem.compile(module, budget=int(0.85 * peak))
    for _ in range(3):
        run(step, args)
        assert equal(gradients(module), expected)
    assert len(step.plans) == 2
    assert fxmem.measure(lambda: run(step, args)).peak_bytes <= int(0.85 * peak)
    module.zero_grad()


def test_a_model_that_dynamo_gives_up_on_is_not_run_over_the_budget_silently():
    class Looped(Blocks):
        def forward(self, x, y):
            for block in self.blocks:
                x = x + block(x)
                print(end="")
            return F.mse_loss(x * self.scale, y)

    _, args = blocks()
    step = fxmem.compile(Looped(), budget=0.5)
    with pytest.raises(fxmem.CaptureError, match="no graph"):
        step(*args)


def test_backward_skipped_or_failing_leaves_no_trace():
    module, args = blocks()
    step = fxmem.compile(module, budget=0.8)
    step(*args)
    loss = step(*args)
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    module.zero_grad()
    run(step, args)
    assert gradients(module)
    assert fxmem.measure(lambda: run(step, args)).peak_bytes <= step.plan.budget_bytes


@pytest.mark.slow
def test_dynamic_batch_keeps_the_budget_with_one_dynamo_compilation():
    module, _ = blocks()
    batches = [tuple(torch.randn(n, 32) for _ in range(2)) for n in (64, 128, 96)]
    peak = fxmem.plan(module, batches[1], budget=None).peak_bytes
    step = fxmem.compile(module, budget=int(0.9 * peak), dynamic=True)
    for args in batches:
        run(step, args)
        module.zero_grad()
        assert fxmem.measure(lambda args=args: run(step, args)).peak_bytes <= int(0.9 * peak)
        module.zero_grad()
    assert len(step.plans) == 1
    too_large = tuple(torch.randn(2048, 32) for _ in range(2))
    with pytest.raises(fxmem.BudgetInfeasible):
        run(step, too_large)


@pytest.mark.slow
def test_torch_compile_backend_by_name():
    module, args = blocks()
    run(module, args)
    expected = gradients(module)
    peak = fxmem.plan(module, args).peak_bytes
    for fraction in (0.9, 0.75):
        step = torch.compile(module, backend="fxmem", options={"budget": int(fraction * peak)})
        run(step, args)
        assert equal(gradients(module), expected)
        assert fxmem.measure(lambda step=step: run(step, args)).peak_bytes <= int(fraction * peak)
        module.zero_grad()
