"""What a compiled step costs beyond torch's own: `fxmem.compile(model)` with no budget against `backend="aot_eager"`.

    python -m bench.overhead [--models gpt2,resnet50,unet] [--pairs 20] [--json]

Steps alternate in one process, each pair in the opposite order of the one before. `wall_ratio` is the median of the
pairs' wall times, `cpu_ratio` of their processor times (all threads of this process: what other processes do counts
less).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch

import fxmem
from bench.common import Row, show
from fxmem.testing import zoo

MODELS = ("gpt2", "resnet50", "unet")
WARM_UP = 3


def seconds(step: Callable[..., Any], args: Sequence[Any], module: torch.nn.Module) -> tuple[float, float]:
    """Wall and processor seconds of one forward and backward."""
    module.zero_grad()
    wall, cpu = time.perf_counter(), time.process_time()
    step(*args).backward()
    return time.perf_counter() - wall, time.process_time() - cpu


def row(name: str, size: zoo.Size, pairs: int) -> Row:
    """Medians of the ratios of `pairs` paired steps of one model."""
    module, args = zoo.build(name, size)
    steps = [torch.compile(module, backend="aot_eager"), fxmem.compile(module)]
    for _ in range(WARM_UP):
        for step in steps:
            seconds(step, args, module)
    ratios: list[tuple[float, ...]] = []
    walls: list[float] = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        took = {which: seconds(steps[which], args, module) for which in order}
        ratios.append(tuple(own / base for own, base in zip(took[1], took[0], strict=True)))
        walls.append(took[0][0])
    wall_ratio, cpu_ratio = (statistics.median(column) for column in zip(*ratios, strict=True))
    step_s = statistics.median(walls)
    return {"model": name, "pairs": pairs, "aot_eager_s": step_s, "wall_ratio": wall_ratio, "cpu_ratio": cpu_ratio}


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True)
@click.option("--pairs", default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(models: str, size: zoo.Size, pairs: int, as_json: bool) -> None:
    """Step time without a budget, over torch.compile(backend="aot_eager")."""
    show([row(name, size, pairs) for name in models.split(",")], as_json, "no budget, over aot_eager (paired steps)")


if __name__ == "__main__":
    main()
