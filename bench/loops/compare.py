"""A loop in eager and under a budget, each in a fresh process; the two compared step by step."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import fxmem
from bench.common import Row
from bench.isolated import Outcome, call, shortened
from bench.loops import around, calls, libraries, models, shapes
from bench.loops.zoo import LOOPS, Loop
from bench.recorder import Recorder, StepRecord, gradient_error
from fxmem.budget import Budget

__all__ = ["LOOPS", "around", "calls", "libraries", "models", "row", "shapes"]  # imported: their loops are in LOOPS

SHARE = 0.75  # of eager's largest peak, where neither the caller nor the loop says


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


def run(name: str, budget: Budget) -> Run:
    """The loop `name` in this process: eager (budget None) or under `budget`."""
    recorder = Recorder(_eager if budget is None else partial(fxmem.compile, budget=budget))
    torch.manual_seed(0)
    found = Run()
    try:
        for step in LOOPS[name].run(recorder):
            found.steps.append(recorder.record(step))
    except Exception as error:
        found.error = f"step {len(found.steps)}: {shortened(error)}"
    recorder.notice_plans()
    found.graphs, found.plans = len(recorder.graphs), len(recorder.plans)
    found.retries = sum(getattr(model, "num_retries", 0) for model in recorder.compiled)
    return found


def _eager(model: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return model


def row(loop: Loop, asked: float | None = None, timeout_s: float = 300) -> Row:
    """Both runs of one loop, compared. `asked`: the share, if not the loop's own or the usual one."""
    share = asked or loop.share or SHARE
    eager: Outcome = call(run, loop.name, None, timeout_s=timeout_s)
    if eager.error or eager.value.error:
        return {"loop": loop.name, **_empty(), "error": f"eager: {eager.error or eager.value.error}"}
    first_bytes = eager.value.steps[0].peak_bytes
    budget_bytes = int(share * (first_bytes if loop.as_fraction else eager.value.peak_bytes))
    budget = share if loop.as_fraction else budget_bytes
    with tempfile.TemporaryDirectory() as folder:
        ours = call(run, loop.name, budget, timeout_s=timeout_s, environ={"FXMEM_CACHE": folder})
    common = {"loop": loop.name, **_empty(), "eager_bytes": eager.value.peak_bytes, "budget_bytes": budget_bytes}
    if ours.error:
        return {**common, "error": ours.error}
    return {**common, **compared(ours.value, eager.value, budget_bytes)}


def _empty() -> Row:
    """Every column, so that tables of failed runs have them all."""
    bytes_, counts = "eager_bytes budget_bytes", "steps over over_new worst_bytes graphs plans replans retries"
    return dict.fromkeys(f"{bytes_} {counts} grad_error loss_error first_s later_s error".split())


def compared(ours: Run, eager: Run, budget_bytes: int) -> Row:
    pairs = list(zip(ours.steps, eager.steps, strict=False))
    excess = [(s.planned, s.peak_bytes - budget_bytes) for s in ours.steps]
    over = [nbytes for planned, nbytes in excess if nbytes > 0 and not planned]
    over_new = [nbytes for planned, nbytes in excess if nbytes > 0 and planned]
    errors = [gradient_error(a.gradients, b.gradients) for a, b in pairs]
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
        "grad_error": max((error for error in errors if error is not None), default=None),
        "loss_error": max((abs(a.loss - b.loss) for a, b in pairs), default=None),
        "first_s": seconds[0] if seconds else None,
        "later_s": statistics.median(seconds[1:]) if seconds[1:] else None,
        "error": ours.error,
    }
