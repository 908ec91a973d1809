"""Real models with a tier, below the smallest budget that recomputation alone can keep.

    python -m bench.offload_models [--models gpt2,unet] [--size tiny] [--tier disk] [--offload-dir DIR] [--json]

`alone_bytes`: smallest peak without a tier; `floor_bytes`: with it; `working_set_bytes`: no schedule that keeps the
order of the ops can peak lower (largest op, with gradients made so far). Where every op may run twice, recompute alone
comes within a percent of it, so a tier lowers the time, not the floor; the `_dropout` models have ops that may not. The
budget is 85 % of `alone_bytes`, or `floor_bytes` if that is more. `same_gradients`: bitwise those of the step with no
budget.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from bench.common import Row, show
from fxmem.planners.problem import reduce_program
from fxmem.planners.recompute.bound import least_bytes
from fxmem.testing import zoo

BATCH = 16  # of the tiny models: large enough for saved tensors to outweigh parameters
MODELS = ("gpt2_dropout", "resnet50_dropout", "unet_dropout", "gpt2", "resnet50", "unet")
_DROPPED = {
    "resnet50": "ResNetConvLayer",
    "unet": "UNetBlock",
}
"""Blocks whose outputs get dropout, as in Wide ResNets and DDPM's U-Net."""


def build(name: str, size: zoo.Size) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of the zoo; with `_dropout`, dropout of 0.1 in it. A tiny one gets a batch of `BATCH`."""
    base = name.removesuffix("_dropout")
    module, args = zoo.build(base if base in _DROPPED else name, size)
    if base != name and base in _DROPPED:
        for part in module.modules():
            if type(part).__name__ == _DROPPED[base]:
                part.register_forward_hook(lambda part, _, out: F.dropout(out, 0.1, part.training))
    if size == "tiny":
        args = tuple(arg.repeat(BATCH // len(arg), *[1] * (arg.dim() - 1)) for arg in args)
    return module, args


def gradients(module: nn.Module, step: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """Gradients of one step with the random numbers of seed 0."""
    torch.manual_seed(0)
    module.zero_grad()
    step(*args).backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def working_set_bytes(plan: fxmem.Plan) -> int:
    """The lower bound on any schedule's peak if every op might run twice."""
    problem = reduce_program(plan.program)
    return least_bytes(replace(problem, recomputable=np.ones_like(problem.recomputable)))


def run(name: str, size: zoo.Size, tier: str, folder: str | Path, solve_s: float | None = None) -> Row:
    """One line of the table. The measured peak is the allocator's, of a step after the first."""
    module, args = build(name, size)
    alone = fxmem.plan(module, args, "min", fission="off", solve_s=solve_s)
    step = fxmem.compile(module, tiers=tier, offload_dir=folder, fission="off", solve_s=solve_s)
    expected = gradients(module, step, args)
    floor = fxmem.plan(module, args, "min", tiers=tier, offload_dir=folder, fission="off", solve_s=solve_s)
    budget = max(int(0.85 * alone.peak_bytes), floor.peak_bytes)
    step.set_budget(budget)
    found = [gradients(module, step, args) for _ in range(2)]
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    module.zero_grad()
    plan = step.plan
    return {
        "model": name,
        "unplanned_bytes": plan.baseline_peak_bytes,
        "alone_bytes": alone.peak_bytes,
        "floor_bytes": floor.peak_bytes,
        "working_set_bytes": working_set_bytes(plan),
        "budget_bytes": budget,
        "below_pct": 100 * (1 - budget / alone.peak_bytes),
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "moved_bytes": plan.simulation.bytes_moved,
        "extra_pct": 100 * plan.extra_s / plan.baseline_s,
        "same_gradients": all(torch.equal(a, b) for grads in found for a, b in zip(grads, expected, strict=True)),
        "retries": step.num_retries,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--size", choices=["tiny", "small"], default="tiny")
    parser.add_argument("--tier", choices=["disk", "host"], default="disk")
    parser.add_argument("--offload-dir", default=tempfile.gettempdir())
    parser.add_argument("--solve-s", type=float, default=None, help="time limit of each plan, in seconds")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    names = given.models.split(",")
    rows = (run(name, given.size, given.tier, given.offload_dir, given.solve_s) for name in names)
    show(rows, given.json, "below what recomputation alone reaches")


if __name__ == "__main__":
    main()
