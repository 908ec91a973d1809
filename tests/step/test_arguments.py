"""What a plan can't undo: inputs overwritten between forward and backward, and backwards that are differentiated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem.errors import CaptureError
from tests.models import blocks, gradients

QUICK = {"solve_s": 0.3}


class Critic(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)]
        layers += [nn.BatchNorm1d(64)] if norm else []
        self.body = nn.Sequential(*layers, nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        return self.body(x).view(-1)


def penalized(critic, real, fake):
    """The critic's loss of WGAN-GP (Gulrajani et al., 2017)."""
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()


def critic_and_batch(**options):
    torch.manual_seed(0)
    return Critic(**options), torch.randn(96, 16), torch.randn(96, 16)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_gradient_penalty_is_eagers_and_its_step_is_measured(dropout):
    critic, *batch = critic_and_batch(dropout=dropout)

    def losses(model, num_steps=4):
        torch.manual_seed(1)
        found = []
        for _ in range(num_steps):
            loss = penalized(model, *batch)
            loss.backward()
            found.append((loss.detach(), gradients(critic)))
        return found

    expected = losses(critic)
    budget = fxmem.measure(lambda: penalized(critic, *batch).backward()).peak_bytes
    critic.zero_grad()
    step = fxmem.compile(critic, budget=2 * budget, **QUICK)
    for (loss, found), (other, wanted) in zip(losses(step), expected, strict=True):
        torch.testing.assert_close(loss, other)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    peak = fxmem.measure(lambda: penalized(step, *batch).backward()).peak_bytes
    assert step.step.measured_peak_bytes == pytest.approx(peak, rel=0.01)  # batch: only the caller holds it


def test_the_part_under_create_graph_counts_against_the_budget():
    critic, *batch = critic_and_batch()
    peak = fxmem.measure(lambda: penalized(critic, *batch).backward()).peak_bytes
    critic.zero_grad()
    step = fxmem.compile(critic, budget=int(0.6 * peak), **QUICK)
    penalized(step, *batch).backward()
    assert step.step.measured_peak_bytes > step.step.budget_bytes
    assert step.num_retries == 1

    def more_steps():
        for _ in range(5):
            critic.zero_grad()
            penalized(step, *batch).backward()

    with pytest.raises(fxmem.BudgetInfeasible, match=r"not planned: backward under create_graph"):
        more_steps()


def test_second_derivatives_for_the_input():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.linspace(0, 1, 64)[:, None].requires_grad_()

    def residual(model):
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        loss = (second + u).square().mean()
        loss.backward()
        return gradients(net)

    expected = residual(net)
    step = fxmem.compile(net, budget="1MiB", **QUICK)
    for _ in range(3):
        torch.testing.assert_close(residual(step), expected, rtol=1e-5, atol=1e-7)


def test_an_argument_made_from_another_is_differentiated_once():
    torch.manual_seed(0)
    weight = torch.randn(8, 8, requires_grad=True)
    step = fxmem.compile(lambda a, b, w: ((a @ w).tanh() * (b @ w).sigmoid()).sum(), budget=None)

    def penalty(function):
        a = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
        b = (3 * a).sin()
        (slope,) = torch.autograd.grad(function(a, b, weight), a, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [a, weight])

    plain = penalty(lambda a, b, w: ((a @ w).tanh() * (b @ w).sigmoid()).sum())
    torch.testing.assert_close(penalty(step), plain)


def test_what_cannot_be_differentiated_twice_is_said_with_a_remedy():
    critic, *batch = critic_and_batch(norm=True)
    step = fxmem.compile(critic, budget="2MiB", **QUICK)
    (slope,) = torch.autograd.grad(step(batch[0].requires_grad_()).sum(), batch[0], create_graph=True)
    with pytest.raises(CaptureError, match=r"leave the part .* out of fxmem.compile"):
        slope.square().sum().backward()
    slopes = torch.autograd.grad(step(batch[0]).sum(), list(critic.parameters()), create_graph=True)
    assert len(slopes) == len(list(critic.parameters())), "nobody differentiates these"


class Cast(nn.Module):
    """Nothing in eager mode needs the bytes that come in, once they are numbers; a plan makes those again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, _ = blocks(num_blocks=2)
        self.shift = nn.Parameter(torch.zeros(32))

    def forward(self, pixels, y):
        return self.body((pixels.float() / 255 - 0.5).exp() + self.shift, y)


@pytest.fixture(name="cast")
def _cast():
    torch.manual_seed(0)
    pixels = [torch.randint(0, 255, (256, 32), dtype=torch.uint8) for _ in range(4)]
    return Cast(), pixels, torch.randn(256, 32)


def refilled(model, static, pixels, y):
    static.copy_(pixels[0])
    found = []
    for following in pixels[1:]:
        loss = model(static, y)
        static.copy_(following)
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    return found


def test_an_input_refilled_before_backward_is_right_from_the_first_step(cast):
    module, pixels, y = cast
    expected = refilled(module, torch.empty_like(pixels[0]), pixels, y)
    step = fxmem.compile(module, budget="min", **QUICK)
    static = torch.empty_like(pixels[0])
    found = refilled(step, static, pixels, y)
    assert torch.equal(static, pixels[-1])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    (graph,) = step.step._graphs
    assert graph.pinned
    peak = fxmem.measure(lambda: step(static, y).backward()).peak_bytes
    assert peak <= step.plan.peak_bytes


def test_a_parameter_moved_before_backward_is_right(cast):
    module, pixels, y = cast

    def steps(model):
        found = []
        for _ in range(3):
            loss = model(pixels[0], y)
            with torch.no_grad():
                module.body.blocks[0][1].bias.add_(0.01)
            loss.backward()
            found.append((loss.detach(), gradients(model)))
        return found

    start = {name: value.clone() for name, value in module.state_dict().items()}
    expected = steps(module)
    module.load_state_dict(start)
    torch.testing.assert_close(steps(fxmem.compile(module, budget="min", **QUICK)), expected, rtol=1e-5, atol=1e-7)


def test_without_a_copy_the_input_is_named_and_the_next_step_goes_on(cast):
    module, pixels, y = cast
    step = fxmem.compile(module, budget="min", **QUICK)
    for _ in range(3):
        step(pixels[0], y).backward()
        module.zero_grad()
    static = pixels[0].clone()
    with pytest.raises(CaptureError, match=r"pixels.* was overwritten in place .*fxmem.keep"):
        refilled(step, static, pixels, y)
    module.zero_grad()
    expected = refilled(module, static, pixels, y)
    torch.testing.assert_close(refilled(step, static, pixels, y), expected, rtol=1e-5, atol=1e-7)


def test_what_eager_needs_too_is_autograds_own_error():
    module, (x, y) = blocks(num_blocks=2)
    step = fxmem.compile(module, budget=0.8, **QUICK)
    loss = step(x, y)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert F.mse_loss(x, y) > 0
