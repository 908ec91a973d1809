"""What a training step shows when it is taken: its loss, gradients, measured peak, and whether anything was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

import fxmem
from fxmem.step.held_tensors import reachable_tensors

Gradients = list[np.ndarray[Any, Any] | None]


@dataclass(frozen=True)
class StepRecord:
    """What one step showed. `planned`: was anything planned in it? `gradients`: of every tensor a model could train."""

    loss: float
    peak_bytes: int
    seconds: float
    planned: bool
    gradients: Gradients


class Recorder:
    """The `compile_` that a loop gets, and what it learns of the models."""

    def __init__(self, compile_: Callable[..., Any]) -> None:
        self.compile_ = compile_
        self.compiled: list[Any] = []
        self.tensors: list[list[Tensor]] = []  # of each model
        self.plans: dict[int, Any] = {}
        self.graphs: set[tuple[int, str]] = set()

    def __call__(self, model: Callable[..., Any], **options: Any) -> Any:
        self.tensors.append([t for t in reachable_tensors(model) if t.is_leaf and t.is_floating_point()])
        self.compiled.append(self.compile_(model, **options))
        return self.compiled[-1]

    def gradients(self) -> Gradients:
        return [None if t.grad is None else t.grad.float().numpy().copy() for own in self.tensors for t in own]

    def notice_plans(self) -> bool:
        """Is any plan new since the last call?"""
        seen = len(self.plans)
        for i, model in enumerate(self.compiled):
            for plan in getattr(model, "plans", []):
                self.plans[id(plan)] = plan
                self.graphs.add((i, plan.program.graph))
        return len(self.plans) > seen

    def record(self, step: Callable[[], Tensor]) -> StepRecord:
        """Take the step, which returns its loss; all of it is measured, and what `step` holds counts."""
        losses: list[float] = []
        measured = fxmem.measure(lambda: losses.append(float(step().detach())))
        planned, gradients = self.notice_plans(), self.gradients()
        return StepRecord(losses[0], measured.peak_bytes, measured.seconds, planned, gradients)


def gradient_error(found: Gradients, expected: Gradients) -> float | None:
    """Norm of the difference over the norm; inf where one side has a gradient and the other none, None without any."""
    if [g is None for g in found] != [g is None for g in expected]:
        return float("inf")
    if all(g is None for g in found):
        return None
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None and b is not None]
    difference = sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in pairs)
    norm = sum(float(np.square(b.astype(np.float64)).sum()) for _, b in pairs)
    return float((difference / norm) ** 0.5) if norm else float(difference)
