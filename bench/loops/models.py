"""Loops over models that do what capture finds hard."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.loops.zoo import MLP, WIDTH, Compile, Steps, Text, classify, labelled, loop, pair, plain, sgd, update
from fxmem.testing.zoo import MLPLoss


@loop()
def masked_select(compile_: Compile) -> Steps:
    """A graph break by a size that depends on data, with work after it."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 6)

        def forward(self, x: Tensor) -> Tensor:
            h = x @ self.weight
            kept = torch.masked_select(h, h > 0)
            for _ in range(3):
                h = F.gelu(h).tanh()
            return h.square().mean() + kept.square().mean()

    return plain(compile_(Masked()), ([torch.randn(1024, WIDTH)] for _ in range(4)))


@loop()
def experts(compile_: Compile) -> Steps:
    """Rows routed to experts by `torch.where`: a loop with sizes that depend on data."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 10)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(1)
            out = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = torch.where(weights.argmax(1) == i)[0]
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, i : i + 1])
            logits: Tensor = self.head(x + out)
            return logits

    return plain(compile_(Experts()), (labelled(1024) for _ in range(4)), classify)


@loop(share=0.97)
def checkpointed(compile_: Compile) -> Steps:
    """The user checkpoints every block already, which leaves little: the floor is at 0.958 of what that takes."""

    class Checkpointed(MLP):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            logits: Tensor = self.head(x)
            return logits

    return plain(compile_(Checkpointed(num_blocks=6)), (labelled(256) for _ in range(4)), classify)


@loop()
def skipped_frame(compile_: Compile) -> Steps:
    """Dynamo skips the frame of one layer: its BatchNorm has `momentum=None`."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH, momentum=None)
            self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.fc2(F.gelu(self.norm(self.fc1(x))))
            return out

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


@loop()
def spectral_norm(compile_: Compile) -> Steps:
    """Parametrized weights whose buffers move in every forward."""

    def block() -> nn.Module:
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(up), nn.GELU(), nn.utils.parametrizations.weight_norm(down)
        )

    model = nn.Sequential(*(block() for _ in range(3)), nn.Linear(WIDTH, 10))
    return plain(compile_(model), (labelled(256) for _ in range(4)), classify)


@loop()
def optional_argument(compile_: Compile) -> Steps:
    """An argument that is sometimes None, and a number that decides how many layers run."""

    class Optional(MLP):
        def forward(self, x: Tensor, scale: Tensor | None = None, num_layers: int = 4) -> Tensor:
            for block in self.blocks[:num_layers]:
                x = x + block(x)
            logits: Tensor = self.head(x if scale is None else x * scale)
            return logits

    def step(model: Any, x: Tensor, y: Tensor, *options: Any) -> Tensor:
        loss = F.cross_entropy(model(x, *options), y)
        loss.backward()
        return loss

    model = compile_(Optional())
    optimizer = sgd(model)
    scale = torch.ones(WIDTH)
    for options in ((), (scale,), (None, 2), (), (scale, 3), (scale,)):
        yield partial(step, model, *labelled(256), *options)
        update(optimizer)


@loop()
def tied_weights(compile_: Compile) -> Steps:
    """One embedding is input and output; its gradient comes in two parts."""

    class Tied(Text):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = self.embed.weight

    return plain(compile_(Tied()), ([torch.randint(64, (16, 48))] for _ in range(4)))


@loop()
def traced(compile_: Compile) -> Steps:
    """Every block calls what Dynamo can't read; captured without it, a smaller last batch included."""

    class Breaking(MLP):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
                unreadable(x)
            logits: Tensor = self.head(x)
            return logits

    model = compile_(Breaking(num_blocks=6), capture="trace")
    return plain(model, (labelled(rows) for rows in (256, 256, 180, 256, 256)), classify)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def unreadable(x: Tensor) -> str:
    return str(x.shape)
