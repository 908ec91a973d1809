"""Time from the call to the first loss under a budget against `backend="aot_eager"`, and what watching steps costs.

    python -m bench.first_step [--models gpt2,resnet50] [--budget 0.7] [--steps 200] [--json]

Each first call runs in a process of its own; costs of ops are in the cache (one call before fills it). `ratio`: of the
two first calls. `watch_pct`: what the measured steps among `--steps` known ones took over the others, in % of all.
"""

from __future__ import annotations

import time
from typing import Any

import click
import torch

import fxmem
from bench.common import Row, show
from bench.isolated import call
from fxmem.testing import zoo

MODELS = ("gpt2", "resnet50")
TIMEOUT_S = 600.0
WATCHED = 0.95  # of the peak of the tiny model, most of which is parameters


def first_loss_s(name: str, size: zoo.Size, budget: float | None) -> float:
    """Seconds of the first call: fxmem under `budget`, or aot_eager for None."""
    module, args = zoo.build(name, size)
    step: Any = torch.compile(module, backend="aot_eager") if budget is None else fxmem.compile(module, budget=budget)
    started = time.perf_counter()
    float(step(*args).detach())
    return time.perf_counter() - started


def watch_share(name: str, num_steps: int) -> float:
    """Share of the time of `num_steps` steps of a known kind that measuring some of them took."""
    module, args = zoo.build(name, "tiny")
    step: Any = fxmem.compile(module, budget=WATCHED)
    for _ in range(3):  # until the kind is known and has held
        step(*args).backward()
        module.zero_grad()
    sampling = step.step.sampling
    sampling.reset()
    for _ in range(num_steps):
        step(*args).backward()
        module.zero_grad()
    return float(sampling.share)


def row(name: str, size: zoo.Size, budget: float, num_steps: int) -> Row:
    runs = [(name, size, budget), (name, size, budget), (name, size, None)]
    _, ours, theirs = (call(first_loss_s, *run, timeout_s=TIMEOUT_S, is_forked=False) for run in runs)
    share = call(watch_share, name, num_steps, timeout_s=TIMEOUT_S)
    for outcome in (ours, theirs, share):
        if outcome.error:
            raise click.ClickException(f"{name}: {outcome.error}")
    return {
        "model": name,
        "budget": budget,
        "aot_eager_s": theirs.value,
        "fxmem_s": ours.value,
        "ratio": ours.value / theirs.value,
        "watch_pct": 100 * share.value,
    }


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True)
@click.option("--budget", default=0.7, show_default=True, help="share of the unplanned peak")
@click.option("--steps", default=200, show_default=True, help="watched steps (tiny model)")
@click.option("--json", "as_json", is_flag=True)
def main(models: str, size: zoo.Size, budget: float, steps: int, as_json: bool) -> None:
    """The first step, and watching the others."""
    show([row(name, size, budget, steps) for name in models.split(",")], as_json, "first call and watched steps")


if __name__ == "__main__":
    main()
