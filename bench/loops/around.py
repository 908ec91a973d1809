"""Loops in which something happens around the step."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.loops.zoo import MLP, WIDTH, Compile, Steps, classify, labelled, loop, pair, plain, sgd, train, update
from fxmem.testing.zoo import MLPLoss


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


@loop()
def moved_bias(compile_: Compile) -> Steps:
    """A bias is moved in place between forward and backward (which doesn't need it), as some routers do."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            model.head.bias.add_(0.01)
        loss.backward()
        return loss

    return plain(compile_(MLP()), (labelled(256) for _ in range(4)), step)


@loop()
def sliced_dataset(compile_: Compile) -> Steps:
    """Batches are slices of one tensor, shuffled ones and plain ones in turn."""
    model = compile_(MLP())
    x, y = labelled(1024)
    order = torch.randperm(1024)
    rows = (rows for i in range(0, 1024, 256) for rows in (slice(i, i + 256), order[i : i + 256]))
    return plain(model, ((x[some], y[some]) for some in rows), classify)


@loop()
def optimizer_in_backward(compile_: Compile) -> Steps:
    """Each parameter is updated as soon as its gradient is there, and the gradient dropped."""
    module = MLPLoss(WIDTH, 4)

    def apply(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.01 * parameter.grad)  # type: ignore[operator]
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(apply)
    model = compile_(module)
    for _ in range(4):
        yield partial(train, model, *pair(256))


@loop()
def kept_gradients(compile_: Compile) -> Steps:
    """`zero_grad(set_to_none=False)`, clipping, a scheduler: gradients stand from the first step on."""
    model = compile_(MLPLoss(WIDTH, 4))
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(4):
        yield partial(train, model, *pair(256))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()


@loop()
def acting_between(compile_: Compile) -> Steps:
    """Reinforcement learning: many calls on one row without gradients, then a step on all of them."""
    model = compile_(MLP())
    optimizer = sgd(model)
    for _ in range(4):
        states = []
        for _ in range(16):
            with torch.no_grad():
                action = model(torch.randn(1, WIDTH)).softmax(1).argmax(1)
            states.append(torch.randn(16, WIDTH) + action)
        x = torch.cat(states)
        yield partial(classify, model, x, torch.randint(10, (len(x),)))
        update(optimizer)
