"""Planned models under DDP and FSDP2, and with collectives inside, on two gloo ranks.

`python -m tests.distributed.parallel SCENARIO ...` prints what each rank found, as JSON.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fxmem
from bench.pipeline_ranks import run_ranks
from fxmem.schedule.actions import Compute, Recompute
from tests.distributed.ranks import TIMEOUT_S

BUDGET = 0.6
WIDTH, ROWS, NUM_STEPS = 32, 512, 4


class AllReduce(torch.autograd.Function):
    """The sum over the ranks, of the gradient too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return collectives.all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return collectives.all_reduce(gradient, "sum", dist.group.WORLD)


class Block(nn.Module):
    """A feed-forward block; with `is_split` its hidden units are shared out over the ranks."""

    def __init__(self, is_split: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.is_split = is_split

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(nn.functional.gelu(self.first(x)))
        return torch.tanh(AllReduce.apply(x) if self.is_split else x)  # type: ignore[no-untyped-call]


class Model(nn.Module):
    def __init__(self, is_split: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(is_split) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def whole_gradients(model: nn.Module) -> list[Tensor]:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g.clone() for g in gradients]


def compare(wrap: Callable[[nn.Module], Any], plan: Callable[[Any], Any], model: nn.Module) -> dict[str, Any]:
    """Steps of `plan(wrap(model))` against those of `wrap(model)`, another batch on every rank."""
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(ROWS, WIDTH)
    plain, planned = wrap(copy.deepcopy(model)), wrap(model)
    plain(x).backward()
    wanted = whole_gradients(plain)
    plain.zero_grad()
    unplanned = fxmem.measure(lambda: plain(x).backward()).peak_bytes
    step, plans = plan(planned)
    equal, peaks = [], []
    for number in range(NUM_STEPS):
        planned.zero_grad()
        dist.barrier()  # steps that are measured start together
        if number:  # the first compiles
            peaks.append(fxmem.measure(lambda: step(x).backward()).peak_bytes)
        else:
            step(x).backward()
        found = whole_gradients(planned)
        equal.append(len(found) == len(wanted) and all(map(torch.equal, found, wanted)))
    return {"equal": equal, "peaks": peaks, "unplanned": unplanned, **_told(plans())}


def _told(plans: list[fxmem.Plan]) -> dict[str, Any]:
    runs = [[p.program.ops[a.op] for a in p.actions if isinstance(a, (Compute, Recompute))] for p in plans]
    return {
        "plans": [hashlib.sha256(str(p.actions).encode()).hexdigest() for p in plans],
        "predicted": [p.peak_bytes for p in plans],
        "budgets": [p.budget_bytes for p in plans],
        "extra_s": [p.extra_s for p in plans],
        "collectives": [sum(op.is_collective for op in p.program.ops) for p in plans],
        "run": [sum(op.is_collective for op in ops) for ops in runs],
        "order": [sorted(at) == at for at in ([op.index for op in ops if op.is_collective] for ops in runs)],
    }


def whole(budget: Any) -> Callable[[Any], Any]:
    """Plan the whole model."""

    def plan(model: Any) -> Any:
        step = fxmem.compile(model, budget=budget, solve_s=0.3)
        return step, lambda: step.plans

    return plan


def by_block(model: Any) -> Any:
    """Plan every block for itself."""
    steps = [fxmem.compile(block, budget="min", solve_s=0.3) for block in model.blocks]
    model.blocks = nn.ModuleList(steps)  # type: ignore[arg-type]
    return model, lambda: [plan for step in steps for plan in step.plans]  # type: ignore[union-attr]


def sharded_by_block(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def scenario(name: str, rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    if name == "ddp":
        return compare(DistributedDataParallel, whole(BUDGET), Model())
    if name == "fsdp":
        return compare(fully_shard, whole(BUDGET), Model())
    if name == "fsdp-blocks":
        return compare(sharded_by_block, by_block, Model())
    if name == "fsdp-joined":
        return compare(sharded_by_block, whole(0.7), Model())
    torch.manual_seed(rank)  # the ranks hold different parts of one model
    budgets = (BUDGET, BUDGET) if name == "collectives" else (0.6, 0.9)
    return compare(lambda model: model, whole(budgets[rank]), Model(is_split=True))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        print(json.dumps(run_ranks(2, lambda rank, name=name: scenario(name, rank), TIMEOUT_S)), flush=True)  # type: ignore[misc]


if __name__ == "__main__":
    main()
