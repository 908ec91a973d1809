"""Loops that call a model, or backward, more than once a step."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.loops.zoo import MLP, WIDTH, Compile, Steps, classify, labelled, loop, pair, plain, sgd, train, update
from fxmem.testing.zoo import MLPLoss


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


@loop()
def adversarial(compile_: Compile) -> Steps:
    """The gradient for the input first, by `torch.autograd.grad`, then a step on the moved input."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.requires_grad_()
        (towards,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return classify(model, (x + 0.1 * towards.sign()).detach(), y)

    return plain(compile_(MLP()), (labelled(256) for _ in range(4)), step)


@loop()
def distillation(compile_: Compile) -> Steps:
    """A compiled teacher without gradients, and the student that is trained to be like it."""
    teacher = compile_(MLP(num_blocks=6).eval().requires_grad_(False))

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        logits = model(x)
        loss = F.cross_entropy(logits, wanted) + F.cross_entropy(logits, y)
        loss.backward()
        return loss

    return plain(compile_(MLP()), (labelled(256) for _ in range(4)), step)


@loop()
def gradients_by_grad(compile_: Compile) -> Steps:
    """`torch.autograd.grad` for all parameters instead of backward; the loop sets `.grad` itself."""

    def step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, y)
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        return loss

    return plain(compile_(MLPLoss(WIDTH, 4)), (pair(256) for _ in range(4)), step)


@loop()
def truncated_bptt(compile_: Compile) -> Steps:
    """A recurrent state goes from one step to the next, detached; four calls of a cell a step."""

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = MLP(num_out=WIDTH), nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = self.body(x + state).tanh()
            return self.head(state), state

    def step(model: Any, x: Tensor, y: Tensor, kept: list[Tensor]) -> Tensor:
        state, loss = kept.pop(), torch.zeros(())
        for _ in range(4):
            logits, state = model(x, state)
            loss = loss + F.cross_entropy(logits, y)
        loss.backward()
        kept.append(state.detach())
        return loss

    model = compile_(Cell())
    optimizer = sgd(model)
    kept = [torch.zeros(64, WIDTH)]
    for _ in range(4):
        yield partial(step, model, *labelled(64), kept)
        update(optimizer)


@loop(share=0.95)
def gradient_penalty(compile_: Compile) -> Steps:
    """A critic whose slope between real and fake is held at one: the gradient of a gradient."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [WIDTH, 4 * WIDTH, 4 * WIDTH, 4 * WIDTH]
            layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
            self.body = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

        def forward(self, x: Tensor) -> Tensor:
            score: Tensor = self.body(x)
            return score

    def step(model: Any, real: Tensor, fake: Tensor) -> Tensor:
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        loss: Tensor = model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        return loss

    return plain(compile_(Critic()), (pair(256) for _ in range(4)), step)


@loop()
def penalty_inside(compile_: Compile) -> Steps:
    """The same, all of the loss in one compiled function."""
    critic = MLP(num_out=1)

    def penalised(real: Tensor, fake: Tensor, mixed: Tensor) -> Tensor:
        mixed = mixed.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss: Tensor = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
        return loss

    loss = compile_(penalised)
    optimizer = sgd(critic)
    for _ in range(4):
        real, fake = pair(128)
        yield partial(train, loss, real, fake, real.lerp(fake, torch.rand(128, 1)))
        update(optimizer)
