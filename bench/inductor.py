"""`inner="inductor"` under a fraction of the peak that inductor itself needs.

    python -m bench.inductor [--models gpt2,resnet50] [--fraction 0.7] [--batches 1] [--json]

`inductor_bytes`: measured peak of `torch.compile(model)`; the budget is `fraction` of it. `inductor_error`: relative
norm of the gradients' difference to that step's. `batches` times the zoo's batch: at the zoo's own, a ResNet-50's
parameters and gradients alone are 0.65 of its peak, which no plan changes.
"""

from __future__ import annotations

import time

import click
import torch

import fxmem
from bench.common import Row, gradients, relative_error, show
from fxmem.testing import zoo

MODELS = ("gpt2", "resnet50")


def row(name: str, size: zoo.Size, fraction: float, batches: int) -> Row:
    """Measured peaks and gradients of one model."""
    module, args = zoo.build(name, size)
    args = tuple(torch.cat([a] * batches) for a in args)
    own = torch.compile(module)
    expected = gradients(module, own, args)
    inductor_bytes = fxmem.measure(lambda: own(*args).backward()).peak_bytes
    module.zero_grad()
    budget_bytes = int(fraction * inductor_bytes)
    started = time.perf_counter()
    step = fxmem.compile(module, budget=budget_bytes, inner="inductor")
    found, retries = gradients(module, step, args), -1
    while step.num_retries > retries:  # a step over the budget is planned again, and the next one verified
        retries = step.num_retries
        found = gradients(module, step, args)
    compile_s = time.perf_counter() - started
    measured_bytes = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    module.zero_grad()
    return {
        "model": name,
        "inductor_bytes": inductor_bytes,
        "budget_bytes": budget_bytes,
        "predicted_bytes": step.plan.peak_bytes,
        "measured_bytes": measured_bytes,
        "under_budget": measured_bytes <= budget_bytes,
        "inductor_error": relative_error(found, expected),
        "retries": retries,
        "compile_s": compile_s,
    }


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True)
@click.option("--fraction", default=0.7, show_default=True)
@click.option("--batches", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(models: str, size: zoo.Size, fraction: float, batches: int, as_json: bool) -> None:
    """fxmem under inductor, at a fraction of inductor's own peak."""
    torch.manual_seed(0)
    title = f"{fraction:g} of inductor's own peak"
    show([row(name, size, fraction, batches) for name in models.split(",")], as_json, title)


if __name__ == "__main__":
    main()
