"""Training loops as people write them, none of which knows fxmem.

A loop is a function `loop(compile_)` that yields its steps: each a call without arguments that runs forward and
backward of one training step and returns the loss. What is between the yields (optimizer, evaluation, new data) runs
before the next step. `compile_(model, **options)` is `fxmem.compile` with a budget, or returns the model as it is; a
loop gives it options only where a user would. Same seed, same weights and data at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Tensor]
Steps = Iterator[Step]
Compile = Callable[..., Any]


@dataclass(frozen=True)
class Loop:
    """`share`: of the largest peak that eager's steps have, to be asked as budget (None: the usual one).
    `as_fraction`: asked as that float, which means a share of the first step's peak."""

    run: Callable[[Compile], Steps]
    share: float | None = None
    as_fraction: bool = False

    @property
    def name(self) -> str:
        return self.run.__name__


LOOPS: dict[str, Loop] = {}


def loop(share: float | None = None, as_fraction: bool = False) -> Callable[[Callable[[Compile], Steps]], Loop]:
    """Put a loop into LOOPS."""

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
        logits: Tensor = self.head(x)
        return logits


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
