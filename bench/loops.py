"""Training loops as people write them, eager against fxmem: budgets held, gradients, plans, seconds.

    python -m bench.loops [NAMES] [--budget 0.75] [--json]

Each loop runs twice, in fresh processes, the second with an empty cost cache and a budget that is a share of the
largest peak of eager's steps. Every step is measured as a whole, forward and backward. `over`: steps above the budget
in which nothing was planned; `over_new`: those in which something was (the measurement that leads to another plan is
one of them); `worst_bytes`: the largest excess of `over`, or of `over_new` where that is 0. `graphs`, `plans`: those
seen after any step. `replans`: plans beyond one a graph. `grad_error`: norm of the difference to eager's gradients over
their norm, the worst step. `loss_error`: largest difference of losses. `later_s`: median of the steps after the first.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

import fxmem
from bench import loops_models, loops_zoo
from bench.common import Row, show
from bench.isolated import Outcome, call, shortened
from bench.loops_zoo import LOOPS, Loop
from fxmem.budget import Budget
from fxmem.step.held_tensors import reachable_tensors

__all__ = ["loops_models", "loops_zoo", "main"]  # imported so that their loops are in LOOPS

Gradients = list[np.ndarray[Any, Any] | None]


@dataclass(frozen=True)
class StepRecord:
    """What one step showed. `planned`: was anything planned in it? `gradients`: of every tensor a model could train."""

    loss: float
    peak_bytes: int
    seconds: float
    planned: bool
    gradients: Gradients


@dataclass
class Run:
    """One run of a loop. `error`: of the step after the last recorded one."""

    steps: list[StepRecord] = field(default_factory=list)
    error: str | None = None
    graphs: int = 0
    plans: int = 0
    retries: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(step.peak_bytes for step in self.steps)


class Recorder:
    """The `compile_` that a loop gets, and what it learns of the models."""

    def __init__(self, compile_: Callable[..., Any]) -> None:
        self.compile_ = compile_
        self.compiled: list[Any] = []
        self.tensors: list[Tensor] = []
        self.plans: dict[int, Any] = {}
        self.graphs: set[tuple[int, str]] = set()

    def __call__(self, model: Callable[..., Any], **options: Any) -> Any:
        self.tensors += [t for t in reachable_tensors(model) if t.is_leaf and t.is_floating_point()]
        self.compiled.append(self.compile_(model, **options))
        return self.compiled[-1]

    def gradients(self) -> Gradients:
        return [None if t.grad is None else t.grad.float().numpy().copy() for t in self.tensors]

    def notice_plans(self) -> bool:
        """Is any plan new since the last call?"""
        seen = len(self.plans)
        for i, model in enumerate(self.compiled):
            for plan in getattr(model, "plans", []):
                self.plans[id(plan)] = plan
                self.graphs.add((i, plan.program.graph))
        return len(self.plans) > seen


def run(name: str, budget: Budget) -> Run:
    """The loop `name` in this process: eager (budget None) or under `budget`, with an empty cost cache."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FXMEM_CACHE"] = folder
        recorder = Recorder(_eager if budget is None else partial(fxmem.compile, budget=budget))
        torch.manual_seed(0)
        found = Run()
        try:
            for step in LOOPS[name].run(recorder):
                found.steps.append(_recorded(recorder, step))
        except Exception as error:
            found.error = f"step {len(found.steps)}: {shortened(error)}"
        recorder.notice_plans()
        found.graphs, found.plans = len(recorder.graphs), len(recorder.plans)
        found.retries = sum(getattr(model, "num_retries", 0) for model in recorder.compiled)
        return found


def _eager(model: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return model


def _recorded(recorder: Recorder, step: Callable[[], Tensor]) -> StepRecord:
    losses: list[float] = []
    measured = fxmem.measure(lambda: losses.append(float(step().detach())))
    return StepRecord(losses[0], measured.peak_bytes, measured.seconds, recorder.notice_plans(), recorder.gradients())


def row(loop: Loop, share: float, timeout_s: float) -> Row:
    """Both runs of one loop, compared."""
    share = loop.share or share
    eager: Outcome = call(run, loop.name, None, timeout_s=timeout_s)
    if eager.error or eager.value.error:
        return {"loop": loop.name, **_empty(), "error": f"eager: {eager.error or eager.value.error}"}
    first_bytes = eager.value.steps[0].peak_bytes
    budget_bytes = int(share * (first_bytes if loop.as_fraction else eager.value.peak_bytes))
    ours = call(run, loop.name, share if loop.as_fraction else budget_bytes, timeout_s=timeout_s)
    common = {"loop": loop.name, **_empty(), "eager_bytes": eager.value.peak_bytes, "budget_bytes": budget_bytes}
    if ours.error:
        return {**common, "error": ours.error}
    return {**common, **_compared(ours.value, eager.value, budget_bytes)}


def _empty() -> Row:
    """Every column, so that tables of failed runs have them all."""
    bytes_, counts = "eager_bytes budget_bytes", "steps over over_new worst_bytes graphs plans replans retries"
    return dict.fromkeys(f"{bytes_} {counts} grad_error loss_error first_s later_s error".split())


def _compared(ours: Run, eager: Run, budget_bytes: int) -> Row:
    pairs = list(zip(ours.steps, eager.steps, strict=False))
    over = [s.peak_bytes - budget_bytes for s in ours.steps if not s.planned and s.peak_bytes > budget_bytes]
    over_new = [s.peak_bytes - budget_bytes for s in ours.steps if s.planned and s.peak_bytes > budget_bytes]
    seconds = [s.seconds for s in ours.steps]
    return {
        "steps": f"{len(ours.steps)}/{len(eager.steps)}",
        "over": len(over),
        "over_new": len(over_new),
        "worst_bytes": max(over or over_new, default=0),
        "graphs": ours.graphs,
        "plans": ours.plans,
        "replans": ours.plans - ours.graphs,
        "retries": ours.retries,
        "grad_error": max((_error(a.gradients, b.gradients) for a, b in pairs), default=None),
        "loss_error": max((abs(a.loss - b.loss) for a, b in pairs), default=None),
        "first_s": seconds[0] if seconds else None,
        "later_s": statistics.median(seconds[1:]) if seconds[1:] else None,
        "error": ours.error,
    }


def _error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference over the norm; inf where one side has a gradient and the other none."""
    if [g is None for g in found] != [g is None for g in expected]:
        return float("inf")
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    difference = sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in pairs)
    norm = sum(float(np.square(b.astype(np.float64)).sum()) for _, b in pairs)
    return float((difference / norm) ** 0.5) if norm else float(difference)


@click.command()
@click.argument("names", nargs=-1)
@click.option("--budget", "share", default=0.75, show_default=True, help="share of eager's largest peak")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="seconds for one run of a loop")
@click.option("--json", "as_json", is_flag=True)
def main(names: Sequence[str], share: float, timeout_s: float, as_json: bool) -> None:
    """Training loops under a budget."""
    started = time.perf_counter()
    rows = []
    for name in names or LOOPS:
        rows.append(row(LOOPS[name], share, timeout_s))
        click.echo(f"{time.perf_counter() - started:6.0f} s  {name}: {rows[-1]['error'] or 'ran'}", err=True)
    if as_json:
        show(rows, as_json, "")
        return
    show([{k: v for k, v in row.items() if k != "error"} for row in rows], as_json, "training loops under a budget")
    for row_ in rows:
        if row_["error"]:
            click.echo(f"{row_['loop']}: {row_['error']}")


if __name__ == "__main__":
    main()
