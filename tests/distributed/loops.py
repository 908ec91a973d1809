"""Training loops as people write them, on two ranks against one process.

`python -m tests.distributed.loops CASE ...` prints what each rank found, as JSON.
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmem
from bench.pipeline_ranks import run_ranks
from tests.distributed.ranks import RATE, TIMEOUT_S

WIDTH, ROWS, NUM_STEPS = 16, 8, 3
Named = Iterable[tuple[str, nn.Parameter]]


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


class Counts(nn.Module):
    """Replaces its buffers, and an attribute that is a tensor, by others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.scale = torch.ones(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.scale = self.scale * 0.9
        return self.layers((x - self.mean) * self.scale) * self.steps


class CountsInTwoStages(nn.Module):
    """A counter that training moves, read at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(), layers()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.second(self.first(x) * (1 + self.count)) * (1 + self.count)


class Affine(torch.autograd.Function):
    """Its weight gradient is made from what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class Late(Affine):
    """Reads its weight in backward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x + bias).relu()


class Custom(nn.Module):
    def __init__(self, kind: type[Affine]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4), nn.Parameter(torch.zeros(WIDTH))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.kind.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call,no-any-return]


class Told(nn.Module):
    """Takes arguments of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor, flag: bool, scale: float, mode: str, other: Tensor | None) -> Tensor:
        return self.layers(x) * (scale if flag and mode == "train" and other is None else 1.0)


class Branches(nn.Module):
    """Microbatches of two rows take a branch of their own, or leave half of the layers out."""

    def __init__(self, takes_more: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.takes_more = takes_more

    def forward(self, x: Tensor) -> Tensor:
        is_small = x.shape[0] == 2
        for number, layer in enumerate(self.layers):
            if is_small and not self.takes_more and number > 3:
                continue
            x = layer(x).relu()
            if is_small and self.takes_more and number == 6:
                x = self.extra(x) + self.layers[0](x)
        return x


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers(2), layers(2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.second, self.first(x), use_reentrant=True)
        return self.first(x)


class Dropped(nn.Module):
    """Made for training, its normalisation frozen; or all of it in evaluation mode."""

    def __init__(self, is_training: bool) -> None:
        super().__init__()
        self.layers, self.norm = layers(), nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.0 if is_training else 0.5)
        self.train(is_training)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layers(self.norm(x)))


def bfloat16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def hooked(parameters: Named) -> None:
    """Freeze the first layer, clip the biases, and act on what was added."""
    for name, parameter in parameters:
        if name.startswith("0."):
            parameter.register_hook(lambda gradient: gradient * 0)
        elif name.endswith("bias"):
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    schedule: str = "1f1b"
    num_microbatches: int = 4
    kwargs: dict[str, Any] = field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    prepare: Callable[[Named], None] = list  # type: ignore[assignment]


TOLD = {"flag": True, "scale": 0.5, "mode": "train", "other": None}
CASES = {
    "counts": Case(Counts),
    "counts in two stages": Case(CountsInTwoStages),
    "affine": Case(lambda: nn.Sequential(*(Custom(Affine) for _ in range(6))), "interleaved-zb"),
    "late": Case(lambda: nn.Sequential(*(Custom(Late) for _ in range(6))), "zbv"),
    "told": Case(Told, kwargs=TOLD),
    "less": Case(lambda: Branches(False), num_microbatches=3),
    "less zbv": Case(lambda: Branches(False), "zbv", num_microbatches=3),
    "more": Case(lambda: Branches(True), num_microbatches=3),
    "more zbv": Case(lambda: Branches(True), "zbv", num_microbatches=3),
    "checkpointed": Case(Checkpointed),
    "frozen": Case(lambda: Dropped(True)),
    "evaluating": Case(lambda: Dropped(False)),
    "autocast": Case(layers, around=bfloat16),
    "hooks": Case(layers, prepare=hooked),
    "hooks zbv": Case(layers, "zbv", prepare=hooked),
}


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def one_process(case: Case) -> tuple[list[float], nn.Module, float]:
    """Losses, the trained model, and the loss of an evaluation after it."""
    torch.manual_seed(0)
    model, (x, y) = case.make(), batch_of(case)
    case.prepare(model.named_parameters())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    parts = list(zip(x.tensor_split(case.num_microbatches), y.tensor_split(case.num_microbatches), strict=True))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        total = 0.0
        for inputs, target in parts:
            with case.around():
                loss = nn.functional.mse_loss(model(inputs, **case.kwargs), target)
                (loss * (len(inputs) / ROWS)).backward()
            total += loss.item() * len(inputs) / ROWS
        optimizer.step()
        losses.append(total)
    model.eval()
    with torch.no_grad(), case.around():
        found = [nn.functional.mse_loss(model(a, **case.kwargs), b).item() * len(a) / ROWS for a, b in parts]
    return losses, model, sum(found)


def train(case: Case, pipe: fxmem.PlannedPipeline, rank: int) -> dict[str, Any]:
    """The worst errors of this rank's losses, parameters and buffers, and of an evaluation."""
    losses, reference, evaluated = one_process(case)
    x, y = batch_of(case)
    made = pipe.stage(rank)
    stages, schedule = made if isinstance(made, list) else [made], pipe.schedule(made)
    held = {name: p for stage in stages for name, p in stage.submod.named_parameters()}
    case.prepare(held.items())
    optimizer, errors = torch.optim.SGD(held.values(), lr=RATE), [0.0]
    for wanted in losses:
        optimizer.zero_grad()
        with case.around():
            loss = schedule.step(x, target=y, **case.kwargs)
        optimizer.step()
        errors.append(abs(loss.item() - wanted) if loss is not None else 0.0)
    for stage in stages:
        stage.submod.eval()
    with case.around():
        loss = schedule.eval(x, target=y, **case.kwargs)
    errors.append(abs(loss.item() - evaluated) if loss is not None else 0.0)
    buffers = {name: b for stage in stages for name, b in stage.submod.named_buffers()}
    for name, tensor in (*held.items(), *buffers.items()):
        module, _, leaf = name.rpartition(".")
        errors.append((tensor - getattr(reference.get_submodule(module), leaf)).abs().max().item())
    return {"error_size": max(errors), "buffers": sorted(buffers)}


def run_case(name: str) -> list[Any]:
    case = CASES[name]
    torch.manual_seed(0)
    model, (x, y) = case.make(), batch_of(case)
    with case.around():
        pipe = fxmem.pipeline(
            model, (x, y), num_stages=2, num_microbatches=case.num_microbatches, schedule=case.schedule,
            loss_fn=nn.functional.mse_loss, kwargs=case.kwargs, solve_s=0.1,
        )  # fmt: skip
    return run_ranks(2, lambda rank: train(case, pipe, rank), TIMEOUT_S)


def plan(model: nn.Module, budget: Any = None, num_microbatches: int | None = 4, num_stages: int = 2) -> Any:
    batch = batch_of(CASES["told"])
    return fxmem.pipeline(
        model, batch, budget, num_stages=num_stages, num_microbatches=num_microbatches, schedule="1f1b",
        loss_fn=nn.functional.mse_loss, solve_s=0.1,
    )  # fmt: skip


def unlike(rank: int) -> Iterator[str]:
    """What each rank is told where two ask for different things."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=rank == 1)
    with autocast:
        yield _message(lambda: plan(layers()))
    yield _message(lambda: plan(layers(), budget=(0.9, 0.8)[rank]))
    yield _message(lambda: plan(layers(), num_microbatches=(None, 4)[rank]))
    yield _message(lambda: plan(layers(6 + rank)))
    yield _message(lambda: plan(layers(), num_microbatches=None))


def _message(call: Callable[[], Any]) -> str:
    try:
        call()
    except fxmem.FxmemError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def two_by_two(rank: int) -> dict[str, Any]:
    """Two pipelines of two stages, each with half of the batch: gradients are averaged after the step."""
    pipelines, copies = ([dist.new_group(ranks) for ranks in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))))
    replica, number = divmod(rank, 2)
    torch.manual_seed(0)
    model, (x, y) = layers(), batch_of(CASES["told"])
    reference = copy.deepcopy(model)
    half = slice(replica * ROWS // 2, (replica + 1) * ROWS // 2)
    pipe = fxmem.pipeline(
        model, (x[half], y[half]), num_stages=2, num_microbatches=2, schedule="1f1b",
        loss_fn=nn.functional.mse_loss, solve_s=0.1,
    )  # fmt: skip
    stage = pipe.stage(number, group=pipelines[replica])
    pipe.schedule(stage).step(x[half], target=y[half])
    for parameter in stage.submod.parameters():
        dist.all_reduce(parameter.grad, group=copies[number])
        parameter.grad /= 2
    nn.functional.mse_loss(reference(x), y).backward()
    wanted = dict(reference.named_parameters())
    errors = [(p.grad - wanted[n].grad).abs().max().item() for n, p in stage.submod.named_parameters()]
    return {"error_size": max(errors, default=0.0)}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        if name == "unlike":
            found = run_ranks(2, lambda rank: {"told": list(unlike(rank))}, TIMEOUT_S)
        else:
            found = run_ranks(4, two_by_two, TIMEOUT_S) if name == "two by two" else run_case(name)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
