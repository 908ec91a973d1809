"""What stages can't do as one process would is refused by name; how long planning goes on is no matter of the clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.errors import OptionError
from fxmem.passes.stage_split import CutError
from fxmem.pipelining import decision
from fxmem.runtime.pipeline.params import Names, Parameters, verify_plain
from tests.zoo import build


class Counter(nn.Module):
    """Counts in a number, which it computes with or not."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.calls, self.is_used = 0, is_used

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x).square().mean() * (self.calls if self.is_used else 1)


class Grows(nn.Module):
    """Replaces a buffer by a longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, self.seen])
        return self.layer(x).square().mean()


def plan(model: nn.Module, num_stages: int = 2, **options: Any) -> fxmem.PlannedPipeline:
    options = {"num_microbatches": 2, "solve_s": 0.1, "schedule": "1f1b"} | options
    return fxmem.pipeline(model, (torch.randn(4, 8),), num_stages=num_stages, **options)


def test_a_number_that_forward_counts_up() -> None:
    with pytest.raises(CutError, match=r"forward changes calls and computes with it.*make it a buffer"):
        plan(Counter(is_used=True))
    model = Counter(is_used=False)
    plan(model)
    assert model.calls == 0, "capture leaves no trace"


def test_a_buffer_of_another_shape() -> None:
    with pytest.raises(fxmem.FxmemError, match="forward replaces buffer 'seen' of a Grows by one of another shape"):
        plan(Grows(), num_stages=1)


def test_another_autocast_than_the_planned_one() -> None:
    runtime = plan(Counter(is_used=False)).runtime
    part, mode = runtime._first, runtime._mode
    runtime.code(0, part, mode)
    other = mode._replace(autocast=mode.autocast._replace(is_on=True, dtype=torch.bfloat16))
    with pytest.raises(OptionError, match=r"runs under autocast to torch.bfloat16.*planned under no autocast"):
        runtime.code(0, part, other)
    runtime.code(0, part, other._replace(has_backward=False))


def test_hooks_on_a_gradient_that_no_stage_has_whole() -> None:
    names = Names(nn.Linear(2, 2, device="meta"))
    for shared, several in (({"weight": (0, 1)}, ()), ({}, ("weight",))):
        parameters = Parameters(names, torch.device("cpu"), shared)
        parameters.load(["weight", "bias"], nn.Linear(2, 2), None)
        parameters.verify_hooks(several)
        parameters.tensors["bias"].register_hook(lambda gradient: gradient)
        parameters.verify_hooks(several)
        parameters.tensors["weight"].register_hook(lambda gradient: gradient)
        with pytest.raises(OptionError, match="weight has hooks on its gradient, but is used in several stages"):
            parameters.verify_hooks(several)


@pytest.mark.parametrize("name", ["DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"])
def test_wrapped_models(name: str) -> None:
    wrapped = type(name, (nn.Module,), {})()
    with pytest.raises(OptionError, match=rf"0 is a {name}.*all_reduce the gradients"):
        verify_plain(nn.Sequential(wrapped))
    verify_plain(nn.Sequential(nn.Linear(2, 2)))


def test_arguments_that_are_no_tensors_nor_comparable() -> None:
    with pytest.raises(OptionError, match="an argument is a bytearray: give a tensor"):
        plan(Counter(is_used=False), kwargs={"x": bytearray(3)})


def test_a_busy_machine_tries_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which every look takes 100 s."""
    model, args = build("mlp")
    quiet = fxmem.pipeline(model, args, num_stages=2, solve_s=0.1).plan
    looks = itertools.count(step=100)
    monkeypatch.setattr(decision, "time", SimpleNamespace(perf_counter=lambda: next(looks)))
    busy = fxmem.pipeline(model, args, num_stages=2, solve_s=0.1).plan
    assert [t[:2] for t in busy.tried] == [t[:2] for t in quiet.tried]
    assert len({t.num_microbatches for t in busy.tried}) > 1
