"""Predicted against measured peak, and gradients, over real models and budgets.

    python -m bench.accuracy [--models gpt2,unet] [--size small] [--json]

Budgets: 1.1 times the smallest feasible, the middle, and 0.9 of the unplanned peak (or halfway to it).
`error_pct`: measured over
predicted. `parts`: those of the region that is split, if one is. `same_gradients`: bitwise those of the same graph
compiled with no budget, which splitting doesn't give; `eager_error`: relative norm of the difference to eager's.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import torch

import fxmem
from bench.common import Row, gradients, parts_of, relative_error, show
from fxmem.testing import zoo

MODELS = ("gpt2", "llama", "bert", "vit", "resnet50", "unet")


def rows(name: str, size: zoo.Size) -> Iterator[Row]:
    """One row per budget of the model `name`."""
    module, args = zoo.build(name, size)
    eager = gradients(module, module, args)
    step = fxmem.compile(module)
    unplanned = gradients(module, step, args)
    step.set_budget("min")
    gradients(module, step, args)
    lowest, peak = step.plan.peak_bytes, step.plan.baseline_peak_bytes
    tight, loose = int(1.1 * lowest), max(int(0.9 * peak), (lowest + peak) // 2)
    for budget_bytes in (tight, (tight + loose) // 2, loose):
        step.set_budget(budget_bytes)
        found = gradients(module, step, args)
        measured_bytes = fxmem.measure(lambda: step(*args).backward()).peak_bytes
        module.zero_grad()
        plan = step.plan
        yield {
            "model": name,
            "budget_bytes": budget_bytes,
            "budget_fraction": budget_bytes / peak,
            "predicted_bytes": plan.peak_bytes,
            "measured_bytes": measured_bytes,
            "error_pct": 100 * (measured_bytes / plan.peak_bytes - 1),
            "under_budget": measured_bytes <= budget_bytes,
            "extra_pct": 100 * plan.extra_s / plan.baseline_s,
            "bound_pct": 100 * plan.lower_bound_s / plan.baseline_s,
            "parts": parts_of(plan),
            "same_gradients": all(torch.equal(a, b) for a, b in zip(found, unplanned, strict=True)),
            "eager_error": relative_error(found, eager),
            "retries": step.num_retries,
        }


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(models: str, size: zoo.Size, as_json: bool) -> None:
    """Predicted against measured peak of real training steps."""
    torch.manual_seed(0)
    show((row for name in models.split(",") for row in rows(name, size)), as_json, "predicted and measured peak")


if __name__ == "__main__":
    main()
