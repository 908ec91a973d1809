"""Loops whose shapes, dtypes or trained parameters change."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.loops.zoo import WIDTH, Compile, Steps, Text, loop, pair, plain, sgd, train, update
from fxmem.testing.zoo import MLPLoss


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
