"""The first step of a kind stays under its budget, too, though nobody knows yet what it will call."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem import compat
from fxmem.errors import CaptureError
from fxmem.ir.program import Program
from tests.models import Blocks

WIDTH = 32
QUICK = {"solve_s": 0.3, "device_spec": "cpu"}  # by the roofline: the same plans on a busy machine


class Body(nn.Module):
    """Residual blocks that return what they make: the loss is outside."""

    def __init__(self, num_blocks=4, num_out=WIDTH, dropout=0.0, normed=False):
        super().__init__()
        layers = [[nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)] for _ in range(num_blocks)]
        norms = [nn.BatchNorm1d(WIDTH)] if normed else []
        self.blocks = nn.ModuleList(nn.Sequential(*layer, *norms, nn.Dropout(dropout)) for layer in layers)
        self.head = nn.Linear(WIDTH, num_out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def both(model, left, right):
    F.mse_loss(model(left), model(right)).backward()


def one_by_one(model, left, right):
    """The loss of the first call goes backward while the second one waits."""
    losses = [model(x).square().mean() for x in (left, right)]
    for loss in losses:
        loss.backward()


def unrolled(model, left, right):
    state = left
    for _ in range(4):
        state = model(state).tanh()
    F.mse_loss(state, right).backward()


def all_pairs(model, left, right):
    """The model's outputs are small beside what the loss makes of them."""
    F.cross_entropy(model(left) @ model(right).T, torch.arange(len(left))).backward()


def first_step(module, take, budget, *more, seed=1, **options):
    """(peak, gradients) of a step, `module` compiled with `budget` if there is one."""
    model = module if budget is None else fxmem.compile(module, budget=budget, **QUICK, **options)
    torch.manual_seed(seed)
    args = (torch.randn(160, WIDTH), torch.randn(160, WIDTH))
    torch.manual_seed(seed)
    peak_bytes = fxmem.measure(lambda: take(model, *more, *args)).peak_bytes
    return peak_bytes, [p.grad for p in module.parameters()]


@pytest.fixture
def given_back(monkeypatch):
    """How many calls gave back what they saved."""
    nodes = []
    made = compat.give_back_saved
    monkeypatch.setattr(compat, "give_back_saved", lambda node: (made(node), nodes.append(node.name()))[0])
    return nodes


@pytest.mark.parametrize(
    ("take", "share"),
    [(both, 0.75), (one_by_one, 0.75), (unrolled, 0.6), (all_pairs, 0.75)],
    ids=["both", "one_by_one", "unrolled", "all_pairs"],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_call_makes_room_for_the_next(take, share, dropout, given_back):
    torch.manual_seed(0)
    module = Body(dropout=dropout)
    peak_bytes, expected = first_step(copy.deepcopy(module), take, None)
    budget = int(share * peak_bytes)
    found_bytes, gradients = first_step(module, take, budget)
    assert found_bytes <= budget
    assert given_back or take in (both, all_pairs)  # which may fit at a price
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_several_backwards_of_a_call_that_ran_again(given_back):
    def take(model, left, right):
        losses = [model(x).square().mean(0) for x in (left, right)]
        for i in range(2):
            sum(loss[i] for loss in losses).backward(retain_graph=i == 0)

    torch.manual_seed(0)
    module = Body(num_out=2)
    peak_bytes, expected = first_step(copy.deepcopy(module), take, None)
    _, gradients = first_step(module, take, int(0.75 * peak_bytes))
    assert given_back
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_running_statistics_are_updated_once_a_call(given_back):
    torch.manual_seed(0)
    module = Body(normed=True)
    plain = copy.deepcopy(module)
    peak_bytes, expected = first_step(plain, both, None)
    _, gradients = first_step(module, both, int(0.75 * peak_bytes))
    assert not given_back
    for mine, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    for mine, theirs in zip(module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_an_argument_overwritten_after_its_call_gave_back_what_it_saved():
    def take(model, left, right, overwrites=True):
        inputs = [left * i for i in range(3)]
        loss = F.mse_loss(sum(map(model, inputs)), right)
        if overwrites:
            inputs[0].zero_()
        loss.backward()

    module = Body()
    peak_bytes, _ = first_step(copy.deepcopy(module), functools.partial(take, overwrites=False), None)
    with pytest.raises(CaptureError, match=r"x_? was overwritten in or since forward, and this first step"):
        first_step(module, take, int(0.5 * peak_bytes))


def test_arguments_live_until_backward_and_no_longer(given_back):
    """They must, where the loop drops them at once, or forward could not run again."""

    def take(model, left, right):
        F.mse_loss(sum(model(left * i) for i in range(3)), right).backward()

    torch.manual_seed(0)
    module = Body()
    peak_bytes, expected = first_step(copy.deepcopy(module), take, None)
    budget = int(0.6 * peak_bytes)
    found_bytes, gradients = first_step(module, take, budget)
    assert given_back
    assert found_bytes <= budget
    for mine, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("num_out", [10, 400])
def test_room_for_a_loss_outside(num_out):
    def take(model, x, _):
        F.cross_entropy(model(x).log_softmax(1).tanh(), torch.arange(len(x)) % 10).backward()

    torch.manual_seed(0)
    module = Body(num_out=num_out)
    peak_bytes, _ = first_step(copy.deepcopy(module), take, None)
    budget = int(0.85 * peak_bytes)
    assert first_step(module, take, budget)[0] <= budget


def test_models_that_may_train_with_it_count():
    """The second model's first step stands beside the first one's parameters and gradients."""

    def take(model, others, left, right):
        others.square().mean().backward()
        F.mse_loss(model(left), right).backward()

    torch.manual_seed(0)
    module, other = Body(), Body(num_blocks=8)
    args = torch.randn(16, WIDTH)
    plain, beside = copy.deepcopy(module), copy.deepcopy(other)
    peak_bytes, _ = first_step(plain, lambda model, *a: take(model, beside(args), *a), None)
    budget = int(0.9 * peak_bytes)
    compiled = fxmem.compile(other, budget=budget, **QUICK)
    found_bytes, _ = first_step(module, lambda model, *a: take(model, compiled(args), *a), budget)
    assert found_bytes <= budget


def test_a_call_whose_backward_never_comes_keeps_nothing_beyond_it():
    def take(critic, generator, left, right):
        loss = F.softplus(-critic(left)).mean() + F.softplus(critic(generator(right).detach())).mean()
        loss.backward()

    torch.manual_seed(0)
    module, generator = Body(num_out=1), Body()
    peak_bytes, _ = first_step(copy.deepcopy(module), take, None, generator)
    budget = int(0.75 * peak_bytes)
    options = {"budget": budget, **QUICK}
    critic, compiled = fxmem.compile(module, **options), fxmem.compile(generator, **options)
    for _ in range(4):
        args = (torch.randn(160, WIDTH), torch.randn(160, WIDTH))
        measured = fxmem.measure(lambda args=args: take(critic, compiled, *args))
        assert measured.peak_bytes <= budget
        module.zero_grad()
    assert critic.plan.peak_bytes == pytest.approx(critic.step.measured_peak_bytes, rel=0.01)


def test_a_gap_stands_once_forward_has_made_its_outputs():
    module = Blocks(num_blocks=1)
    program: Program = fxmem.plan(module, args=(torch.randn(8, 32), torch.randn(8, 32))).program
    wide = program.with_gap(1 << 20)
    ((before, after),) = [(a, b) for a, b in zip(program.ops, wide.ops, strict=True) if a != b]
    assert after.workspace_bytes == before.workspace_bytes + (1 << 20)
    assert before.region == "forward"
    assert before.index in program.forward_outputs
    assert wide.with_gap(0) == program


def test_a_model_that_merely_exists_makes_no_other_one_infeasible():
    budget = "3MiB"
    large = fxmem.compile(nn.Linear(1024, 1024), budget=budget, **QUICK)
    assert first_step(Body(), both, budget)[0] <= 3 * 2**20
    del large  # until here


def test_a_model_that_reads_what_another_one_dropped_out():
    """What another call reads is never made again, and needs no state to draw it from."""
    torch.manual_seed(0)
    first, second = Body(dropout=0.1), Body(num_out=1)
    first.head = nn.Dropout(0.1)

    def take(model, others, left, right):
        model(others(left)).square().mean().backward()

    plain = copy.deepcopy(second)
    peak_bytes, expected = first_step(plain, take, None, copy.deepcopy(first))
    budget = int(0.7 * peak_bytes)
    compiled = fxmem.compile(second, budget=budget, **QUICK)
    others = fxmem.compile(first, budget=budget, **QUICK)
    for _ in range(3):
        second.zero_grad()
        first.zero_grad()
        torch.manual_seed(1)
        args = (torch.randn(160, WIDTH), torch.randn(160, WIDTH))
        torch.manual_seed(1)
        assert fxmem.measure(lambda args=args: take(compiled, others, *args)).peak_bytes <= budget
        for mine, theirs in zip(second.parameters(), expected, strict=True):
            assert torch.equal(mine.grad, theirs)


def test_a_call_that_had_no_backward_is_planned_anew_when_it_has_one():
    def take(model, left, right, detaches):
        first = model(left)
        F.mse_loss(model(right), first.detach() if detaches else first).backward()

    torch.manual_seed(0)
    module = Body()
    peak_bytes, _ = first_step(copy.deepcopy(module), functools.partial(take, detaches=False), None)
    budget = int(0.7 * peak_bytes)
    step = fxmem.compile(module, budget=budget, **QUICK)
    for detaches in (True, False):
        for _ in range(4):
            args = (torch.randn(160, WIDTH), torch.randn(160, WIDTH))
            assert fxmem.measure(lambda args=args, d=detaches: take(step, *args, d)).peak_bytes <= budget
            module.zero_grad()
        assert step.plans
        (kind,) = step.step._kinds
        assert [part.has_backward for part in kind.parts] == [not detaches, True]
