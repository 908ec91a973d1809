"""Training loops as people write them, none of which knows fxmem.

A loop is a function `loop(compile_)` that yields its steps: each a call without arguments that runs forward and
backward of one training step and returns the loss. What is between the yields (optimizer, evaluation, new data) runs
before the next step. `compile_(model, **options)` is `fxmem.compile` with a budget, or returns the model as it is; a
loop gives it options only where a user would. Same seed, same weights and data at each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.testing.zoo import MLPLoss

Step = Callable[[], Tensor]
Steps = Iterator[Step]
Compile = Callable[..., Any]


@dataclass(frozen=True)
class Loop:
    """`share`: of the largest peak that eager's steps have, to be asked as budget. `as_fraction`: asked as that float,
    which means a share of the first step's peak."""

    run: Callable[[Compile], Steps]
    share: float | None = None
    as_fraction: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


LOOPS: dict[str, Loop] = {}


def loop(share: float | None = None, as_fraction: bool = False) -> Callable[[Callable[[Compile], Steps]], Loop]:
    """Put a loop into LOOPS; `share` None: whatever the caller of the bench asks."""

    def register(run: Callable[[Compile], Steps]) -> Loop:
        made = Loop(run, share, as_fraction)
        LOOPS[made.name] = made
        return made

    return register


WIDTH = 32


class MLP(nn.Module):
    """Residual blocks and a head; returns logits."""

    def __init__(self, num_blocks: int = 4, num_out: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(WIDTH, num_out)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Text(nn.Module):
    """A small causal transformer; returns the loss of predicting `ids`."""

    def __init__(self, vocab: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def pair(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a regression."""
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def labelled(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes."""
    return torch.randn(rows, WIDTH), torch.randint(10, (rows,))


def train(model: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    """One step of a model that returns its loss."""
    loss = model(*batch)
    loss.backward()
    return loss


def classify(model: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """One step with the loss outside the model."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    return loss


def update(optimizer: torch.optim.Optimizer) -> None:
    """What stands between two steps."""
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def plain(model: Any, batches: Iterable[Sequence[Tensor]], step: Callable[..., Tensor] = train) -> Steps:
    """A step and an update a batch."""
    optimizer = sgd(model)
    for batch in batches:
        yield partial(step, model, *batch)
        update(optimizer)


# --- shapes, dtypes, what is trained -------------------------------------------------------------------------------


@loop()
def partial_batch(compile_: Compile) -> Steps:
    """Two epochs whose last batch is smaller."""
    model = compile_(MLPLoss(WIDTH, 4))
    return plain(model, (pair(rows) for _ in range(2) for rows in (256, 256, 200)))


@loop()
def six_lengths(compile_: Compile) -> Steps:
    """Text padded to six lengths."""
    model = compile_(Text())
    return plain(model, ([torch.randint(64, (16, length))] for _ in range(2) for length in (24, 32, 40, 48, 56, 64)))


@loop()
def many_lengths(compile_: Compile) -> Steps:
    """More lengths than Dynamo compiles a frame for (eight)."""
    model = compile_(Text())
    return plain(model, ([torch.randint(64, (16, 64 - 3 * i))] for _ in range(2) for i in range(12)))


@loop()
def larger_batch(compile_: Compile) -> Steps:
    """The batch doubles midway."""
    model = compile_(MLPLoss(WIDTH, 4))
    return plain(model, (pair(rows) for rows in (128, 128, 128, 256, 256, 256)))


@loop(share=0.75, as_fraction=True)
def fraction_of_changing_shapes(compile_: Compile) -> Steps:
    """A fraction as budget means a share of the first step's peak, whatever shapes follow."""
    model = compile_(MLPLoss(WIDTH, 4))
    return plain(model, (pair(rows) for _ in range(2) for rows in (256, 200, 264, 272)))


@loop()
def autocast_later(compile_: Compile) -> Steps:
    """bfloat16 autocast is switched on, and off again."""
    model = compile_(MLPLoss(WIDTH, 4))
    optimizer = sgd(model)
    for enabled in (False, False, True, True, False, False):

        def step(model: Any, x: Tensor, y: Tensor, enabled: bool) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss: Tensor = model(x, y)
            loss.backward()
            return loss

        yield partial(step, model, *pair(256), enabled)
        update(optimizer)


@loop()
def frozen_and_thawed(compile_: Compile) -> Steps:
    """The lower half is frozen after two steps and thawed after four."""
    module = MLPLoss(WIDTH, 4)
    model = compile_(module)
    optimizer = sgd(model)
    for trains in (True, True, False, False, True, True):
        module.blocks[:2].requires_grad_(trains)
        yield partial(train, model, *pair(256))
        update(optimizer)


@loop()
def dynamo_reset(compile_: Compile) -> Steps:
    """Somebody else resets Dynamo every second step."""
    model = compile_(MLPLoss(WIDTH, 4))
    optimizer = sgd(model)
    for i in range(6):
        if i % 2:
            torch.compiler.reset()
        yield partial(train, model, *pair(256))
        update(optimizer)


# --- several calls a step ------------------------------------------------------------------------------------------


@loop()
def siamese(compile_: Compile) -> Steps:
    """One module called twice in a step, a contrastive loss over both."""

    def step(model: Any, left: Tensor, right: Tensor) -> Tensor:
        loss = F.cross_entropy(model(left) @ model(right).T, torch.arange(len(left)))
        loss.backward()
        return loss

    return plain(compile_(MLP()), (pair(160) for _ in range(4)), step)


@loop()
def two_forwards(compile_: Compile) -> Steps:
    """Two losses are added before one backward."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, y) + 0.1 * model(y, x)
        loss.backward()
        return loss

    return plain(compile_(MLPLoss(WIDTH, 4)), (pair(160) for _ in range(4)), step)


@loop()
def gan(compile_: Compile) -> Steps:
    """D on real, D on fake, then G through D, each with its own backward."""
    generator, critic = compile_(MLP(num_out=WIDTH)), compile_(MLP(num_out=1))
    for_g, for_d = sgd(generator), sgd(critic)

    def step_d(generator: Any, critic: Any, real: Tensor, noise: Tensor) -> Tensor:
        loss: Tensor = F.softplus(-critic(real)).mean() + F.softplus(critic(generator(noise).detach())).mean()
        loss.backward()
        return loss

    def step_g(generator: Any, critic: Any, noise: Tensor) -> Tensor:
        loss = F.softplus(-critic(generator(noise))).mean()
        loss.backward()
        return loss

    for _ in range(3):
        real, noise = pair(128)
        yield partial(step_d, generator, critic, real, noise)
        update(for_d)
        yield partial(step_g, generator, critic, noise)
        update(for_g)
        for_d.zero_grad()


@loop()
def two_models(compile_: Compile) -> Steps:
    """Two compiled models, each with its forward and backward, in one step."""
    first, second = compile_(MLPLoss(WIDTH, 4)), compile_(MLPLoss(WIDTH, 3))
    optimizers = sgd(first), sgd(second)

    def step(first: Any, second: Any, x: Tensor, y: Tensor) -> Tensor:
        return train(first, x, y) + train(second, y, x)

    for _ in range(4):
        yield partial(step, first, second, *pair(256))
        for optimizer in optimizers:
            update(optimizer)


@loop()
def thrown_away_metrics(compile_: Compile) -> Steps:
    """Accuracy is computed with gradients on, after the step and before it, and thrown away."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        before = (model(x).argmax(1) == y).float().mean()
        loss = classify(model, x, y)
        after = (model(x).argmax(1) == y).float().mean()
        assert before <= 1 >= after
        return loss

    return plain(compile_(MLP()), (labelled(256) for _ in range(4)), step)


@loop()
def several_backwards(compile_: Compile) -> Steps:
    """Three losses of one forward, a backward each."""

    class ThreeLosses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MLP(num_out=30)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            return tuple(F.cross_entropy(logits, y) for logits in self.body(x).chunk(3, dim=1))

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        losses = model(x, y)
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i < 2)
        return torch.stack([loss.detach() for loss in losses]).sum()

    return plain(compile_(ThreeLosses()), (labelled(256) for _ in range(4)), step)


# --- around the step -----------------------------------------------------------------------------------------------


@loop()
def loss_outside(compile_: Compile) -> Steps:
    """`F.cross_entropy(model(x), y)`."""
    return plain(compile_(MLP()), (labelled(256) for _ in range(4)), classify)


@loop()
def wide_loss_outside(compile_: Compile) -> Steps:
    """The same with as many classes as a vocabulary has: the loss makes the peak."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).log_softmax(1).tanh(), y)
        loss.backward()
        return loss

    return plain(compile_(MLP(num_out=400)), (labelled(256) for _ in range(4)), step)


@loop()
def accumulation(compile_: Compile) -> Steps:
    """Four backward passes an update."""
    model = compile_(MLPLoss(WIDTH, 4))
    optimizer = sgd(model)
    for i in range(8):
        yield partial(train, model, *pair(256))
        if i % 4 == 3:
            update(optimizer)


@loop()
def accumulation_with_optimizer(compile_: Compile) -> Steps:
    """The same, with Adam's state inside the budget."""
    module = MLPLoss(WIDTH, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    model = compile_(module, optimizer=optimizer)

    def step(model: Any, optimizer: torch.optim.Optimizer, *batch: Tensor) -> Tensor:
        assert optimizer.param_groups
        return train(model, *batch)

    for i in range(8):
        yield partial(step, model, optimizer, *pair(256))
        if i % 4 == 3:
            update(optimizer)


@loop()
def evaluation_between(compile_: Compile) -> Steps:
    """Evaluation without gradients, in eval mode, on other sizes, after every second step."""
    model = compile_(MLP())
    for i, step in enumerate(plain(model, (labelled(256) for _ in range(6)), classify)):
        yield step
        if i % 2:
            model.eval()
            with torch.no_grad():
                model(torch.randn(300, WIDTH))
            model.train()


@loop()
def lightning_like(compile_: Compile) -> Steps:
    """A sanity validation first, epochs with a partial batch, validation after each."""
    model = compile_(MLP())

    def validate() -> None:
        model.eval()
        with torch.no_grad():
            for rows in (256, 100):
                x, y = labelled(rows)
                F.cross_entropy(model(x), y)
        model.train()

    validate()
    for _ in range(2):
        yield from plain(model, map(labelled, (256, 256, 180)), classify)
        validate()


@loop()
def failing_backward(compile_: Compile) -> Steps:
    """Now and then the loss is not worth a backward, or a hook fails in the middle of it."""

    def fail(_: Tensor) -> None:
        raise RuntimeError("the user's own hook")

    def step(model: Any, x: Tensor, y: Tensor, ends: str) -> Tensor:
        loss: Tensor = model(x, y)
        if ends == "skipped":
            return loss.detach()
        if ends == "failing":
            hook = next(model.parameters()).register_hook(fail)
            with contextlib.suppress(RuntimeError):
                loss.backward()
            hook.remove()
            model.zero_grad()
            return loss.detach()
        loss.backward()
        return loss

    model = compile_(MLPLoss(WIDTH, 4))
    optimizer = sgd(model)
    for ends in ("full", "skipped", "full", "failing", "full", "skipped", "failing", "full"):
        yield partial(step, model, *pair(256), ends)
        update(optimizer)


@loop()
def refilled_input(compile_: Compile) -> Steps:
    """One input buffer, refilled with the next batch between forward and backward (its old value isn't needed)."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MLPLoss(WIDTH, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.body(x + 1, y)
            return loss

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, y)
        x.normal_()
        loss.backward()
        return loss

    x, y = pair(256)
    return plain(compile_(Scaled()), ([x, y] for _ in range(4)), step)


# --- what the model does -------------------------------------------------------------------------------------------


@loop(share=0.787)
def masked_select(compile_: Compile) -> Steps:
    """A graph break by a size that depends on data, with work after it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(256, 512, bias=False), nn.Linear(512, 256)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            kept = torch.masked_select(h, h > 0)
            h = self.second(F.gelu(h)).sigmoid().tanh()
            return h.square().mean() + kept.square().mean()

    return plain(compile_(Masked()), ([torch.randn(256, 256)] for _ in range(4)))


@loop()
def skipped_frame(compile_: Compile) -> Steps:
    """Dynamo skips the frame of one layer: its BatchNorm has `momentum=None`."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH, momentum=None)
            self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.fc2(F.gelu(self.norm(self.fc1(x))))

    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(3)]
    model = nn.Sequential(layers[0], layers[1], Normed(), layers[2], nn.Linear(WIDTH, 10))
    return plain(compile_(model), (labelled(256) for _ in range(4)), classify)


@loop()
def counter(compile_: Compile) -> Steps:
    """A number that the model counts up in each forward."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.num_calls = MLPLoss(WIDTH, 4), 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.num_calls += 1
            loss: Tensor = self.body(x, y) * min(1.0, self.num_calls / 5)
            return loss

    return plain(compile_(Counting()), (pair(256) for _ in range(6)))


@loop()
def first_call_attribute(compile_: Compile) -> Steps:
    """The model notes something about its data in its first call."""

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = MLPLoss(WIDTH, 4)
            self.problem: str | None = None

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if self.problem is None:
                self.problem = "regression" if y.is_floating_point() else "classification"
            loss: Tensor = self.body(x, y)
            return loss

    return plain(compile_(Noting()), (pair(256) for _ in range(4)))


@loop()
def unreached_parameters(compile_: Compile) -> Steps:
    """A second body, trainable and as large, that the loss doesn't reach."""

    class TwoBodies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = MLPLoss(WIDTH, 4), MLPLoss(WIDTH, 4)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = self.used(x, y)
            return loss

    return plain(compile_(TwoBodies()), (pair(256) for _ in range(4)))


@loop()
def dropout(compile_: Compile) -> Steps:
    """Random numbers in forward."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)))
    return plain(compile_(model), (labelled(512) for _ in range(4)), classify)


@loop()
def running_buffer(compile_: Compile) -> Steps:
    """BatchNorm, and a buffer that forward assigns anew."""

    class Running(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = MLPLoss(WIDTH, 4), nn.BatchNorm1d(WIDTH)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            loss: Tensor = self.body(self.norm(x) - self.mean, y)
            return loss

    return plain(compile_(Running()), (pair(256) for _ in range(4)))


@loop()
def lstm_text(compile_: Compile) -> Steps:
    """An LSTM over text, a linear head, the loss in the model."""

    class LSTMText(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(64, WIDTH), nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
            self.fc, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 64)

        def forward(self, ids: Tensor) -> Tensor:
            hidden, _ = self.rnn(self.embed(ids))
            logits = self.head(F.gelu(self.fc(hidden)))
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return plain(compile_(LSTMText()), ([torch.randint(64, (16, 24))] for _ in range(4)))
