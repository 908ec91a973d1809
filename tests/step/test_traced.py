"""`capture="trace"`: whole steps of models that Dynamo breaks, captured without it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem.errors import CaptureError, OptionError
from tests.models import Blocks, blocks, gradients

QUICK = {"solve_s": 0.3}


@torch.compiler.disable
def untraceable(x):
    return str(x.shape)


class Breaking(Blocks):
    """Calls what Dynamo can't trace between its blocks; dropout and BatchNorm at its end."""

    def __init__(self, num_blocks=3):
        super().__init__(num_blocks, dropout=0.1)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x, y, mask=None, *, scale=1.0):
        for block in self.blocks:
            x = x + block(x)
            untraceable(x)
        x = self.norm(x) * scale
        if mask is not None:
            x = x * mask
        return {"loss": F.mse_loss(x * self.scale, y), "hidden": x, "rows": len(x)}


def breaking(rows=128):
    torch.manual_seed(0)
    return Breaking(), (torch.randn(rows, 32), torch.randn(rows, 32))


def run(model, args, **kwargs):
    loss = model(*args, **kwargs)["loss"]
    loss.backward()
    return loss.detach()


def steps(module, model, batches):
    """Losses, gradients and buffers after each step."""
    torch.manual_seed(1)
    found = []
    for args in batches:
        found.append((run(model, args), gradients(module), [b.clone() for b in module.buffers()]))
    return found


@pytest.mark.slow
def test_a_model_that_dynamo_breaks_is_one_graph_and_trains_as_eager_does():
    module, args = breaking()
    start = {name: value.clone() for name, value in module.state_dict().items()}
    batches = [args, args, tuple(t[:50] for t in args), args]
    expected = steps(module, module, batches)
    budget = int(0.8 * fxmem.measure(lambda: run(module, args)).peak_bytes)
    module.zero_grad()
    module.load_state_dict(start)
    step = fxmem.compile(module, budget=budget, capture="trace", **QUICK)
    torch.testing.assert_close(steps(module, step, batches), expected, rtol=1e-5, atol=1e-7)
    assert len(step.plans) == 1
    assert len(step.step._graphs) == 2, "the smaller batch is captured by itself"
    assert step.plan.extra_s > 0
    assert fxmem.measure(lambda: run(step, args)).peak_bytes <= budget
    names = {op.label for op in step.plan.program.ops if op.is_input}
    assert {name for name, _ in module.named_parameters()} <= names


def test_evaluation_between_and_other_arguments_are_captures_of_their_own():
    module, args = breaking()
    step = fxmem.compile(module, budget="4MiB", capture="trace", **QUICK)
    run(step, args)
    step.eval()
    with torch.no_grad():
        torch.testing.assert_close(step(*args)["hidden"], module(*args)["hidden"])
    assert len(step.step._graphs) == 1, "without gradients the model runs as it is"
    torch.testing.assert_close(run(step, args), run(module, args))
    step.train()
    mask = torch.rand(32)
    for kwargs in ({"scale": 2.0}, {"mask": mask}, {"scale": 2.0}):
        torch.manual_seed(1)
        found = run(step, args, **kwargs)
        torch.manual_seed(1)
        torch.testing.assert_close(found, run(module, args, **kwargs))
    assert len(step.step._graphs) == 4
    result = step(*args)
    assert (list(result), result["rows"]) == (["loss", "hidden", "rows"], 128)


def test_what_is_frozen_added_or_tied_is_captured_anew():
    module, args = blocks(num_blocks=2)
    step = fxmem.compile(module, budget="4MiB", capture="trace", **QUICK)

    def check():
        step(*args).backward()
        found = gradients(module)
        module(*args).backward()
        torch.testing.assert_close(found, gradients(module), rtol=1e-5, atol=1e-7)

    check()
    module.blocks[0].requires_grad_(False)
    check()
    module.blocks[1][3] = nn.Sequential(nn.Linear(128, 8), nn.Linear(8, 32))
    check()
    module.blocks[0][1].weight = module.blocks[1][1].weight
    check()
    assert len(step.step._graphs) == 4


def test_the_plan_made_ahead_applies():
    module, args = breaking()
    plan = fxmem.plan(module, args, budget=0.8, capture="trace", **QUICK)
    step = fxmem.compile(module, capture="trace", plan=plan)
    run(step, args)
    assert step.plans[0].actions == plan.actions


def test_a_function_a_loss_and_an_argument_that_is_a_view():
    torch.manual_seed(0)
    head, data = nn.Linear(16, 4), torch.randn(64, 16)
    step = fxmem.compile(head, budget="1MiB", capture="trace", loss_fn=F.cross_entropy, **QUICK)
    target = torch.randint(4, (32,))
    for rows in (data[:32], data[32:]):
        step(rows, target).backward()
        found = gradients(head)
        F.cross_entropy(head(rows), target).backward()
        torch.testing.assert_close(found, gradients(head))
    assert len(step.step._graphs) == 1


class Branching(Blocks):
    def forward(self, x, y):
        if x.sum() > 0:
            x = -x
        return super().forward(x, y)


class Counting(Blocks):
    kind = None

    def forward(self, x, y):
        self.kind = "regression"  # the same at every call
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return super().forward(x, y)


class Reassigning(Blocks):
    def forward(self, x, y):
        self.scale = 0.9 * self.scale
        return super().forward(x, y)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branching, r"(?s)test_traced.py:\d+: if x.sum\(\) > 0"),
        (Counting, "forward changes the attribute 'num_calls' of Counting"),
        (Reassigning, "forward changes the attribute 'scale' of Reassigning"),
    ],
)
def test_what_cannot_be_captured_is_named_and_the_model_left_as_it_was(model, message):
    module, (_, args) = model(1), blocks()
    before = dict(module.state_dict())
    step = fxmem.compile(module, budget="4MiB", capture="trace", **QUICK)
    with pytest.raises(CaptureError, match=message):
        step(*args)
    assert all(value is before[name] or torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_arguments_and_options_that_do_not_go_with_it_are_refused():
    module, (x, y) = blocks(num_blocks=1)
    step = fxmem.compile(lambda a, b, other: module(a, b), budget=None, capture="trace")
    with pytest.raises(CaptureError, match="not Generator"):
        step(x, y, torch.Generator())
    for options, message in (({"dynamic": True}, "symbols"), ({"capture": "jit"}, "dynamo, trace")):
        with pytest.raises(OptionError, match=message):
            fxmem.compile(module, **{"capture": "trace", **options})
    with pytest.raises(OptionError, match=r"use fxmem.compile"):
        torch.compile(module, backend="fxmem", options={"capture": "trace"})(x, y)


def test_a_gradient_penalty_goes_with_it():
    torch.manual_seed(0)
    critic, x = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), torch.randn(64, 8, requires_grad=True)

    def penalty(model):
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        return gradients(critic)

    torch.testing.assert_close(penalty(fxmem.compile(critic, capture="trace")), penalty(critic))


@pytest.mark.slow
def test_gpt2_with_labels_is_one_graph():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=128, n_positions=32)
    module = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(128, (4, 32))

    def train(model):
        torch.manual_seed(1)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), gradients(module)

    expected = train(module)
    peak = fxmem.measure(lambda: train(module)).peak_bytes
    step = fxmem.compile(module, budget=int(0.8 * peak), capture="trace", **QUICK)
    for _ in range(3):
        torch.testing.assert_close(train(step), expected, rtol=1e-5, atol=1e-7)
    assert step.num_retries <= 1
    assert len(step.plans) == 1
    assert step.step.measured_peak_bytes <= step.step.budget_bytes
