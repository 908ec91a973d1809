"""A model that was compiled and is no longer held goes, and its memory with it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import fxmem
from fxmem.step.compiled import Step
from fxmem.step.living import Living
from tests.models import Blocks


class InPlace(Blocks):
    """A class of its own: Dynamo keeps compiled code by class."""


def by_compile(module):
    return fxmem.compile(module, budget="10MiB", solve_s=0.1)


def by_function(module):
    return fxmem.compile(lambda x, y: module(x, y), budget="10MiB", solve_s=0.1)


def by_trace(module):
    return fxmem.compile(module, budget="10MiB", solve_s=0.1, capture="trace")


def by_torch(module):
    return torch.compile(module, backend="fxmem", options={"budget": "10MiB", "solve_s": 0.1})


def in_place(module):
    module.compile(backend="fxmem", options={"budget": "10MiB", "solve_s": 0.1})
    return module


@pytest.mark.parametrize("compile_", [by_compile, by_function, by_trace, by_torch, in_place])
def test_no_model_outlives_its_last_reference(compile_):
    module = InPlace(num_blocks=1)
    step = compile_(module)
    for _ in range(2):
        step(torch.randn(8, 32), torch.randn(8, 32)).backward()
    found = [weakref.ref(module), weakref.ref(next(module.parameters()))]
    del module, step
    gc.collect()
    assert [ref() for ref in found] == [None, None]


def test_no_step_outlives_what_was_compiled():
    step = fxmem.compile(Blocks(num_blocks=1), budget="10MiB", solve_s=0.1)
    step(torch.randn(8, 32), torch.randn(8, 32)).backward()
    found: weakref.ref[Step] = weakref.ref(step.step)
    del step
    gc.collect()
    assert found() is None


def test_callables_in_order_without_those_that_are_gone():
    class Slotted:
        __slots__ = ()

        def __call__(self):
            pass

    modules = [nn.Linear(1, 1) for _ in range(3)]
    functions = Living([modules[0].forward, modules[1]])
    functions.add([modules[2].forward, Slotted()])
    assert [type(f) for f in functions][-1] is Slotted
    del modules[0]
    gc.collect()
    assert list(functions)[:2] == [modules[0], modules[1].forward]
