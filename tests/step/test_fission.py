"""Splitting in real steps: chosen where it pays, measured as predicted, the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem
from fxmem.capture import capture
from fxmem.errors import OptionError
from fxmem.ir.program import Fission
from fxmem.options import settings
from fxmem.step.forms import Forms
from tests.planned import train


class Classifier(nn.Module):
    """A small body and a large vocabulary: three tensors of the logits' size are what its step needs."""

    def __init__(self, num_classes: int = 2048, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), labels, ignore_index=0)


def classifier(rows: int = 256) -> tuple[Classifier, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Classifier(), (torch.randn(rows, 32), torch.randint(2048, (rows,)))


def test_a_budget_that_only_splitting_keeps_is_kept() -> None:
    module, args = classifier()
    expected = train(module, module, args)
    with pytest.raises(fxmem.BudgetInfeasible) as refused:
        fxmem.plan(module, args, 0.45, fission="off")
    step = fxmem.compile(module, budget=0.45)
    for _ in range(2):
        for found, wanted in zip(train(step, module, args), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert step.plan.program.fissions
    assert step.plan.peak_bytes < refused.value.min_bytes
    module.zero_grad()
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    assert measured <= step.plan.budget_bytes
    assert abs(measured - step.plan.peak_bytes) <= 0.005 * measured
    assert step.num_retries == 0


def test_the_smallest_budget_is_never_larger_for_it_and_figures_are_the_unsplit_graphs() -> None:
    module, args = classifier()
    off = fxmem.plan(module, args, "min", fission="off", solve_s=0.3)
    auto = fxmem.plan(module, args, "min", solve_s=0.3)
    assert auto.peak_bytes < 0.6 * off.peak_bytes
    assert (auto.baseline_peak_bytes, auto.baseline_s) == (off.baseline_peak_bytes, off.baseline_s)
    assert fxmem.plan(module, args, 0.99).extra_s <= fxmem.plan(module, args, 0.99, fission="off").extra_s


def test_nothing_is_split_where_nothing_is_gained() -> None:
    module, args = classifier()
    assert not fxmem.plan(module, args).program.fissions
    assert not fxmem.plan(module, args, 1.0).program.fissions
    module, args = classifier(rows=8)
    assert not fxmem.plan(module, args, "min").program.fissions


def test_a_plan_file_carries_how_the_graph_was_split(tmp_path: Path) -> None:
    module, args = classifier()
    plan = fxmem.plan(module, args, 0.45)
    plan.save(tmp_path / "plan.json")
    loaded = fxmem.Plan.load(tmp_path / "plan.json")
    assert loaded.program.fissions == plan.program.fissions
    assert (loaded.extra_s, loaded.baseline_peak_bytes) == (plan.extra_s, plan.baseline_peak_bytes)
    expected = train(module, module, args)
    step = fxmem.compile(module, plan=loaded)
    for found, wanted in zip(train(step, module, args), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert step.plan.actions == plan.actions


def test_regions_may_be_named() -> None:
    module, args = classifier()
    fissions = fxmem.plan(module, args, 0.45).program.fissions
    assert fxmem.plan(module, args, fission=fissions).program.fissions == fissions
    with pytest.raises(OptionError, match="fission must be"):
        fxmem.compile(module, fission="always")  # type: ignore[arg-type]
    with pytest.raises(fxmem.FxmemError):
        fxmem.plan(module, args, fission=[Fission(0, 7, (0, 1))])


def test_a_loss_outside_of_the_model_and_logits_that_come_back() -> None:
    """Two graphs' worth of memory beside each other, planned as one step, one of them split."""
    torch.manual_seed(0)
    body, args = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), classifier()[1]
    head = Classifier()
    optimized, compiled = fxmem.compile(body), fxmem.compile(head, budget=0.5)

    def step(function: Any, other: Any) -> list[Tensor]:
        for module in (body, head):
            module.zero_grad()
        other(function(args[0]), args[1]).backward()
        return [p.grad.clone() for m in (body, head) for p in m.parameters() if p.grad is not None]

    expected = step(body, head)
    for _ in range(2):
        for found, wanted in zip(step(optimized, compiled), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_sizes_that_vary_are_compiled_one_by_one_where_only_splitting_fits() -> None:
    """Dynamo makes symbols of sizes that were seen to change, and those are not split."""
    module = classifier()[0]
    step = fxmem.compile(module, budget="3MiB")
    for rows in (256, 192, 225, 256):
        args = classifier(rows)[1]
        expected = train(module, module, args, 1)
        for found, wanted in zip(train(step, module, args, 1), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert step.plan.program.fissions
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.compile(module, budget="3MiB", dynamic=True)(*args)


def test_backward_twice_and_a_tangent_that_is_not_one() -> None:
    module, args = classifier()
    step = fxmem.compile(module, budget=0.45)
    (3 * module(*args)).backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    loss = step(*args)
    (1.0 * loss).backward(retain_graph=True)
    (2.0 * loss).backward()
    for found, wanted in zip([p.grad for p in module.parameters()], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Tagger(nn.Module):
    """Tokens in, a class for each of them out; `tied`: one table for both; `adapters`: all else is frozen."""

    def __init__(self, tied: bool = False, dropout: float = 0.0, adapters: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, 32)
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(dropout))
        self.head = nn.Linear(32, 2048, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.requires_grad_(not adapters)
        shapes = ((32, 4), (4, 2048)) if adapters else ()
        self.adapter = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.body(self.embed(tokens))
        scores = self.head(x)
        return F.cross_entropy(scores + self.adapter(x) if len(self.adapter) else scores, labels, ignore_index=0)


def tagger(rows: int = 256, **options: Any) -> tuple[Tagger, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Tagger(**options), (torch.randint(2048, (rows,)), torch.randint(2048, (rows,)))


@pytest.mark.parametrize(
    ("rows", "options"),
    [(256, {"tied": True}), (256, {"dropout": 0.3}), (256, {"adapters": True}), (251, {})],
    ids=["tied", "dropout", "frozen", "ragged"],
)
def test_gradients_and_bytes_of_steps_that_are_split(rows: int, options: dict[str, Any]) -> None:
    """The same masks are drawn as unsplit; what is measured is what was predicted."""
    module, args = tagger(rows, **options)
    expected = train(module, module, args)
    step = fxmem.compile(module, budget=0.45, solve_s=0.3)
    for found, wanted in zip(train(step, module, args), expected, strict=True):
        assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())
    assert step.plan.program.fissions
    module.zero_grad()
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    assert measured <= step.plan.budget_bytes
    assert abs(measured - step.plan.peak_bytes) <= 0.005 * measured


def test_sums_over_parts_are_no_less_exact_under_autocast() -> None:
    """bfloat16's own rounding is most of the error against float32; parts add up in float32 and add none to it."""
    module, args = tagger(1024)
    exact = train(module, module, args, 1)
    with torch.autocast("cpu", torch.bfloat16):
        whole = train(module, module, args, 1)
        step = fxmem.compile(module, budget=0.3, solve_s=0.3)
        parts = train(step, module, args, 1)
    assert step.plan.program.fissions
    for found, wanted, right in zip(parts, whole, exact, strict=True):
        assert found.dtype is wanted.dtype
        assert float((found - right).norm()) <= 1.1 * float((wanted - right).norm()) + 1e-6 * float(right.norm())


def test_a_batch_of_one_trains_unsplit_and_split_along_its_tokens() -> None:
    class OneText(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tagger = Tagger()

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            scores = self.tagger.head(self.tagger.body(self.tagger.embed(tokens)))
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten())

    torch.manual_seed(0)
    module, args = OneText(), (torch.randint(2048, (1, 256)), torch.randint(2048, (1, 256)))
    expected = train(module, module, args, 1)
    step = fxmem.compile(module, budget=0.45, solve_s=0.3)
    for found, wanted in zip(train(step, module, args, 1), expected, strict=True):
        assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())
    (fission,) = step.plan.program.fissions
    assert fission.size == 256


class Answer(nn.Module):
    """Returns its logits beside its loss, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = Classifier()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.classifier.head(self.classifier.body(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.slow
def test_outputs_that_nobody_uses_are_not_made_whole() -> None:
    args = classifier()[1]
    torch.manual_seed(0)
    module = Answer()
    whole, used = (fxmem.plan(module, args, "min", outputs=outputs, solve_s=0.3) for outputs in (None, "loss"))
    assert used.peak_bytes < whole.peak_bytes
    module(*args)["loss"].backward()
    expected = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    step = fxmem.compile(module, budget=used.peak_bytes + 2**16, outputs=["loss"], solve_s=0.3)
    found = step(*args)
    found["loss"].backward()
    assert found["logits"] is None
    for p, wanted in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, wanted, rtol=1e-5, atol=1e-6)
    assert fxmem.compile(module, outputs=lambda result: result["loss"])(*args).ndim == 0
    with pytest.raises(Exception, match="no score"):
        fxmem.compile(module, outputs="score")(*args)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_parts_stay_parts_under_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone, inductor sums up the bias's gradient over all parts in one kernel, for which all of them stand."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, args = classifier(1024)
    expected = train(module, module, args, 1)
    step = fxmem.compile(module, budget="3MiB", inner="inductor")
    for found, wanted in zip(train(step, module, args, 1), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert step.plan.program.fissions
    assert step.num_retries == 0
    step(*args).backward()
    measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    assert measured <= step.plan.peak_bytes


def test_parts_that_need_more_than_they_should_are_given_up() -> None:
    module, args = classifier()
    forms = Forms(capture(module, args)[0], settings(inner="inductor"), may_run=False)
    assert forms.others
    forms.refuse_parts()
    assert not forms.others
    assert any("inductor" in line for line in forms.notes(())["not split"])
