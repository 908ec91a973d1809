"""The bench of training loops: its loops run in eager as they are, its rows say what happened."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from bench.loops.compare import LOOPS, Run, compared, row, run
from bench.recorder import StepRecord, gradient_error

TORCHVISION = ("faster_rcnn",)
LEAVES_NO_GRADIENT = ("optimizer_in_backward",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOOPS if name not in TORCHVISION])
def test_loop_runs_in_eager_and_trains(name: str) -> None:
    found = run(name, None)
    assert found.error is None
    assert len(found.steps) >= 4
    assert all(math.isfinite(step.loss) and step.peak_bytes > 0 for step in found.steps)
    has_gradients = any(gradient is not None and gradient.any() for step in found.steps for gradient in step.gradients)
    assert has_gradients == (name not in LEAVES_NO_GRADIENT)


def test_optimizer_in_backward_moves_every_parameter() -> None:
    models: list[nn.Module] = []
    for step in LOOPS["optimizer_in_backward"].run(lambda model: models.append(model) or model):
        before = [p.detach().clone() for p in models[0].parameters()]
        step()
        assert not any(torch.equal(p, old) for p, old in zip(models[0].parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["dropout", "partial_batch", "gan"])
def test_loop_is_the_same_in_every_run(name: str) -> None:
    first, second = run(name, None), run(name, None)
    for one, other in zip(first.steps, second.steps, strict=True):
        assert (one.loss, one.peak_bytes) == (other.loss, other.peak_bytes)
        assert gradient_error(one.gradients, other.gradients) == 0


@pytest.mark.slow
def test_row_of_a_loop_that_keeps_its_budget() -> None:
    found = row(LOOPS["dropout"])
    assert found["error"] is None
    assert (found["steps"], found["over"], found["graphs"], found["grad_error"]) == ("4/4", 0, 1, 0)
    assert found["budget_bytes"] == int(0.75 * found["eager_bytes"])


def record(peak_bytes: int, planned: bool, gradient: float | None = 1.0) -> StepRecord:
    return StepRecord(1.0, peak_bytes, 0.1, planned, [None if gradient is None else np.array([gradient])])


def test_excess_of_steps_in_which_something_was_planned_is_counted_apart() -> None:
    eager = Run([record(100, False)] * 4)
    ours = Run([record(90, True), record(80, True), record(75, False), record(77, False)], "step 4: Oops", 1, 2)
    found = compared(ours, eager, budget_bytes=75)
    assert (found["over"], found["over_new"], found["worst_bytes"], found["replans"]) == (1, 2, 2, 1)
    assert found["error"] == "step 4: Oops"


def test_a_missing_gradient_is_an_infinite_error() -> None:
    assert gradient_error([None], [np.ones(2)]) == math.inf
    assert gradient_error([np.ones(2), None], [np.ones(2), None]) == 0
    assert gradient_error([None], [None]) is None
    assert gradient_error([np.full(2, 1.1)], [np.ones(2)]) == pytest.approx(0.1)
