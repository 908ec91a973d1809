"""Recomputation next to random numbers, in-place updates and ties: faults that users of other tools reported."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.schedule import Recompute
from tests.models import blocks

SIZE = 48


def both(module, args, budget="min"):
    """(loss, gradients, buffers) of one step in eager mode and under `budget`, from one seed; and the compiled step."""
    results = []
    for compiles in (False, True):
        mine = copy.deepcopy(module)
        step = fxmem.compile(mine, budget=budget, solve_s=0.3) if compiles else mine
        torch.manual_seed(3)
        loss = step(*args)
        loss.backward()
        gradients = [p.grad for p in mine.parameters()]
        results.append((loss.detach(), gradients, dict(mine.named_buffers())))
    assert step.plan.extra_s > 0, "the budget makes nothing be recomputed"
    assert step.num_retries == 0
    return results


def same(left, right):
    (loss, grads, buffers), (other_loss, other_grads, other_buffers) = left, right
    assert torch.equal(loss, other_loss)
    assert all(map(torch.equal, grads, other_grads))
    assert buffers.keys() == other_buffers.keys()
    assert all(torch.equal(value, other_buffers[name]) for name, value in buffers.items())


class Drawn(nn.Module):
    """Something random between functions that are cheap to recompute."""

    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE) + 0.5)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.draw((x * self.weight).cos().exp()).sin() + 0.1
        return x.sum()


DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "randn_like": lambda h: h + torch.randn_like(h),
    "rand_like": lambda h: torch.where(torch.rand_like(h) < 0.5, h, h * 2),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.3)),
    "multinomial": lambda h: h[:, torch.multinomial(h.detach().mean(0), SIZE, replacement=True)],
    "attention": lambda h: F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], dropout_p=0.4)[
        0, 0
    ],
    "rrelu": lambda h: F.rrelu(h - 1.5, training=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_was_drawn_is_never_drawn_anew(name):  # pytorch#190758, #190717
    same(*both(Drawn(DRAWS[name]), (torch.rand(SIZE, SIZE),)))


def test_mask_of_output_and_gradient_agree():  # pytorch#190758
    def drop(x):
        y = F.dropout(x, 0.5)
        return y, (y.exp().cos() * y).sum()

    x = torch.ones(64, 64, requires_grad=True)
    y, loss = fxmem.compile(drop, budget="min", solve_s=0.3)(x)
    loss.backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 0 < int((y == 0).sum()) < y.numel()


def test_losses_do_not_drift():  # DeepSpeed#6811, OLMo-core#828
    def losses(budget):
        module, args = blocks(batch=64, num_blocks=2, dropout=0.3)
        step = fxmem.compile(module, budget=budget, solve_s=0.3)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        torch.manual_seed(1)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = step(*args)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found, step.plan.extra_s

    expected, _ = losses(None)
    found, extra_s = losses(0.8)
    assert found == expected
    assert extra_s > 0


class Attending(nn.Module):
    """Dropout on attention's probabilities and on what comes out of it, twice."""

    def __init__(self):
        super().__init__()
        self.heads, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.heads(x).chunk(3, dim=-1))
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2).transpose(1, 2).flatten(2)
            x = F.dropout(F.gelu(self.out(x)), 0.3)
        return x.square().mean()


def test_losses_and_gradients_of_20_steps_with_dropout_replayed():
    def steps(budget):
        torch.manual_seed(0)
        module, x = Attending(), torch.rand(4, 32, 32)
        step = fxmem.compile(module, budget=budget, solve_s=0.3)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = step(x)
            loss.backward()
            optimizer.step()
            found += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
        return found, torch.rand(4), step

    expected, then, _ = steps(None)
    found, then_too, step = steps("min")
    assert all(map(torch.equal, expected, found))
    assert torch.equal(then, then_too)
    ops = step.plan.program.ops
    replayed = {ops[a.op].name for a in step.plan.actions if isinstance(a, Recompute) and ops[a.op].is_random}
    assert len(replayed) >= 2
    assert step.step.measured_peak_bytes == step.plan.peak_bytes


@pytest.mark.slow
def test_bert_with_dropout_runs_in_half_of_its_unplanned_peak():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    module = transformers.BertForMaskedLM(config)
    tokens = torch.randint(0, 64, (8, 64))
    expected = copy.deepcopy(module)
    torch.manual_seed(3)
    expected(input_ids=tokens, labels=tokens).loss.backward()
    step = fxmem.compile(module, budget=0.5, solve_s=0.5)
    torch.manual_seed(3)
    step(input_ids=tokens, labels=tokens).loss.backward()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    assert all(map(torch.equal, grads, (p.grad for p in expected.parameters() if p.grad is not None)))
    assert step.step.measured_peak_bytes <= 0.5 * step.plan.baseline_peak_bytes


class Bumped(nn.Module):
    """Reads a buffer, then overwrites it: backward must not read the new value."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))
        self.register_buffer("seen", torch.rand(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        k = self.seen.sin()
        h = x * self.weight
        for _ in range(4):
            h = (h * k).exp().cos()
        self.seen.add_(1)
        return h.sum()


def test_buffer_overwritten_in_forward():  # pytorch PR#197039
    same(*both(Bumped(), (torch.rand(SIZE, SIZE),)))


def test_buffer_overwritten_by_the_user_between_forward_and_backward():  # pytorch PR#197039
    class Read(Bumped):
        def forward(self, x):
            h = x * self.weight
            for _ in range(4):
                h = (h * self.seen.sin()).exp().cos()
            return h.sum()

    module = Read()
    expected = copy.deepcopy(module)
    x = torch.rand(SIZE, SIZE)
    expected(x).backward()
    step = fxmem.compile(module, budget="min", solve_s=0.3)
    loss = step(x)
    module.seen.add_(1)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(module.weight.grad, expected.weight.grad)


class _CountsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(1)
        return 2 * grad, None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_update_in_backward_only():  # pytorch#155242
    class Counted(Bumped):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))

        def forward(self, x):
            h = _CountsBackward.apply((x * self.weight).exp().cos().exp(), self.count)
            return h.exp().cos().sum()

    eager, planned = both(Counted(), (torch.rand(SIZE, SIZE),))
    same(eager, planned)
    assert torch.equal(planned[2]["count"], torch.ones(4))


class Router(nn.Module):
    """Experts by top-2 of scores that are all equal, and a count of the load."""

    def __init__(self, num_experts=4, width=16):
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))
        self.register_buffer("load", torch.zeros(num_experts))
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            scores = F.softmax(self.gate(x), -1)
            best, which = scores.topk(2, -1)
            self.load.add_(torch.zeros_like(scores).scatter(-1, which, 1.0).sum(0))
            share = torch.zeros_like(scores).scatter(-1, which, best)
            x = x + sum(share[:, e : e + 1] * F.gelu(expert(x)) for e, expert in enumerate(self.experts))
        return x.square().mean()


def test_ties_route_alike_and_loads_count_once():  # Automodel#3140, #3247
    eager, planned = both(Router(), (torch.rand(128, 16),))
    same(eager, planned)
    assert float(planned[2]["load"].sum()) == 2 * 2 * 128
