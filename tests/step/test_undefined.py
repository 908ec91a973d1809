"""Outputs beside the loss whose gradients never come: the scores that a model with labels returns."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem.capture import capture
from fxmem.passes.zero_tangents import tangent_outputs, without_tangents

ROWS, WIDTH, CLASSES = 1024, 32, 512
SCORES = 4 * ROWS * CLASSES
TINY = 100  # the loss of the step before


class Labelled(nn.Module):
    """Returns loss and scores, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, labels, shift):
        scores = self.head(self.body(x + shift))
        return F.cross_entropy(scores, labels), scores


def build():
    torch.manual_seed(0)
    model = Labelled()
    return model, torch.randn(ROWS, WIDTH), torch.randint(CLASSES, (ROWS,)), torch.randn(())


def loss_only(loss, scores):
    return loss


def both(loss, scores):
    return loss + scores.square().mean()


def train(function, args, loss_of, outputs):
    torch.manual_seed(1)
    outputs[:] = function(*args)
    loss_of(*outputs).backward()


class Loop:
    """Keeps what the model returned until the next call returns, as loops do. Eager beside it, with the same draws."""

    def __init__(self, budget, **options):
        self.model, *self.args = build()
        self.plain = copy.deepcopy(self.model)
        self.step = fxmem.compile(self.model, budget=budget, **options)
        self.outputs = []

    def check(self, loss_of=loss_only):
        """Gradients are eager mode's; returns the measured peak."""
        for model in (self.plain, self.model):
            model.zero_grad()
        train(self.plain, self.args, loss_of, [])
        step, args, outputs = self.step, self.args, self.outputs
        peak_bytes = fxmem.measure(lambda: train(step, args, loss_of, outputs)).peak_bytes
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
        return peak_bytes

    @property
    def undefined_bytes(self):
        """Of the gradients of outputs that the plan counts."""
        program = self.step.plans[0].program
        nbytes = program.nbytes()
        return sum(nbytes[s] for op in program.ops if op.is_input and op.region == "backward" for s in op.storages)


def test_a_gradient_that_never_comes_takes_no_bytes_from_the_second_step_on():
    loop = Loop(budget=10**9)
    peaks = [loop.check() for _ in range(3)]
    assert peaks[0] >= peaks[1] + 0.9 * SCORES
    assert peaks[1] == peaks[2] == pytest.approx(loop.step.plan.peak_bytes, abs=TINY)
    assert loop.undefined_bytes < TINY


def test_where_nothing_fits_with_it_the_first_step_does_without():
    """The second step has the scores of the first beside it, which nobody could know."""
    budget = int(2.2 * SCORES)
    loop = Loop(budget=budget)
    peaks = [loop.check() for _ in range(5)]
    assert peaks[0] <= budget
    assert max(peaks[2:]) <= budget
    with pytest.raises(fxmem.BudgetInfeasible):
        Loop(budget=int(0.9 * SCORES)).check()


def test_a_gradient_that_comes_later_is_right_and_counts_from_then_on():
    loop = Loop(budget=10**9)
    for loss_of in (loss_only, loss_only, both, both, loss_only, both):
        loop.check(loss_of)
    assert loop.undefined_bytes >= SCORES
    assert loop.check(both) == pytest.approx(loop.step.plan.peak_bytes, abs=TINY)


def test_a_gradient_that_comes_too_late_is_refused_once():
    loop = Loop(budget=10**9)
    for _ in range(2):
        loop.check()
    loss, scores = loop.step(*loop.args[:2], loop.args[2].clone())  # which backward does not read: it is gone by then
    with pytest.raises(fxmem.CaptureError, match="a gradient came of an output that had none in the steps before"):
        both(loss, scores).backward()
    for _ in range(2):
        loop.check(both)


def test_backward_of_one_output_after_the_other():
    loop = Loop(budget=10**9)

    def run(function):
        torch.manual_seed(1)
        loss, scores = function(*loop.args)
        loss.backward(retain_graph=True)
        scores.square().mean().backward()

    for _ in range(3):
        for model in (loop.plain, loop.model):
            model.zero_grad()
        run(loop.plain)
        run(loop.step)
        for p, q in zip(loop.model.parameters(), loop.plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
    assert loop.undefined_bytes >= SCORES


def test_a_plan_without_it_can_be_saved_and_used(tmp_path):
    loop = Loop(budget=10**9)
    for _ in range(2):
        loop.check()
    loop.step.plan.save(tmp_path / "plan.json")
    again = Loop(budget=None, plan=fxmem.Plan.load(tmp_path / "plan.json"))
    assert again.check() <= loop.step.plan.peak_bytes + TINY
    assert again.undefined_bytes < TINY


def test_graphs_without_a_gradient_compute_the_same():
    model, *args = build()
    (joint,) = capture(model, args)
    (loss, scores) = sorted(tangent_outputs(joint), key=lambda i: tangent_outputs(joint)[i].meta["val"].dim())
    less = without_tangents(joint, {scores})
    assert less.tangents == joint.tangents
    assert len(less.nodes) < len(joint.nodes)
    assert without_tangents(joint, {loss, scores}) is None, "gradients would be zeros all over"
    (normed,) = capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), args[:1])
    assert not tangent_outputs(normed), "nothing that overwrites its buffers can be run again"


def test_sizes_that_vary_stay_symbols():
    """Asking how large an output is must not make its size a number for good."""
    loop = Loop(budget=10**9)
    for rows in (ROWS, ROWS // 2, ROWS // 4, ROWS // 8):
        loop.step(loop.args[0][:rows].clone(), loop.args[1][:rows].clone(), loop.args[2])[0].backward()
    assert len(loop.step.step._graphs) <= 2
