"""Transfers in code that inductor compiled: it may lay tensors out otherwise than the graph says."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.capture import JointGraph
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes import rewrite
from fxmem.passes.offload import open_transfers
from fxmem.runtime.transfers import ops
from fxmem.step.lower import backend, split
from fxmem.testing import zoo
from tests.planned import train
from tests.runtime.transfers.plans import full_plan, offload_plan, saved_storages


class Convolutions(nn.Module):
    """Inductor wants its convolutions in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else 8, 8, 3, padding=1) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.silu(layer(x))
        return x.square().mean()


class Rotary(nn.Module):
    """Attention over rotated queries and keys: pointwise results whose traced strides are not contiguous."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.project(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        angle = torch.arange(length).float()[:, None] * torch.linspace(0.1, 1.0, width // 4)
        turned = [t * angle.cos() + t.flip(-1) * angle.sin() for t in (query, key)]
        mixed = F.scaled_dot_product_attention(*turned, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)).square().mean()


class OddLinears(nn.Module):
    """Rows that inductor pads, if it may (on CPU it must be told to)."""

    def __init__(self, width: int = 130) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


def check(
    module: nn.Module, args: Sequence[Any], folder: Path, monkeypatch: pytest.MonkeyPatch, draws: bool = False
) -> None:
    """With everything that can move moved, twice the gradients of eager mode, or (`draws`: inductor draws other random
    numbers) of compiled code that moves nothing; and no tensor had to be copied to get the planned layout."""
    num_moved, laid_out, copied = 0, ops.laid_out, list[Any]()

    def watched(x: Tensor, stride: Any) -> Tensor:
        found = laid_out(x, stride)
        copied.extend([(x.shape, x.stride(), stride)] if found is not x else [])
        return found

    def compiled(moves: bool) -> Any:
        def partition(joint: JointGraph) -> Any:
            nonlocal num_moved
            program = program_from_joint(joint)
            actions = full_plan(program)
            moved = saved_storages(program, actions, joint) if moves else []
            num_moved += len(moved)
            actions = offload_plan(program, actions, moved, ("host", "disk"), seed=0)
            transfers = open_transfers(program, actions, folder)
            stack.callback(transfers.close)
            return split(rewrite(joint, program, actions, transfers.key))

        torch.compiler.reset()
        return torch.compile(module, backend=backend(partition, "inductor", f"{id(folder)} {moves}"))

    with ExitStack() as stack:
        monkeypatch.setattr(ops, "laid_out", watched)
        expected = train(compiled(False) if draws else module, module, args)
        for found, wanted in zip(train(compiled(True), module, args), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()) + 1e-12)
    assert num_moved > 2
    assert copied == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2_dropout", "resnet50"])  # minutes each
def test_models_of_the_zoo(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, args = smallest(name)
    # In double precision: batch norm over two values makes of inductor's other order of sums other gradients in single.
    args = [x.double() if x.is_floating_point() else x for x in args]
    check(module.double(), args, tmp_path, monkeypatch, draws="dropout" in name)


def smallest(name: str) -> tuple[Any, Any]:
    """A model of the zoo that still has every op of it: what repeats would cost minutes of compilation."""
    module, args = zoo.build(name)
    body: Any = getattr(module, "model", module)
    if name == "gpt2_dropout":
        body.transformer.h = body.transformer.h[:1]
    if name == "resnet50":  # two stages, each of a block
        stages = body.resnet.encoder.stages = body.resnet.encoder.stages[:2]
        for stage in stages:
            stage.layers = stage.layers[:1]
        body.classifier[1] = nn.Linear(stages[-1].layers[-1].layer[-1].convolution.out_channels, 10)
    return module, args


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "convolutions": (Convolutions, (4, 3, 16, 16)),
    "rotary": (Rotary, (2, 16, 32)),
    "odd linears": (OddLinears, (64, 130)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_layouts_that_inductor_would_change(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    make, shape = CASES[name]
    config = importlib.import_module("torch._inductor.config")
    with config.patch(disable_padding_cpu=False, padding_stride_threshold=0):
        check(make(), (torch.randn(shape),), tmp_path, monkeypatch)
