"""The HTML report: self-contained, the plan's own numbers, names as in the model; in a browser if there is one."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import fxmem
from bench.browser import browse
from fxmem.planners.plan import Plan
from fxmem.report.chart import Axes, binned
from fxmem.report.decisions import saved_tensors
from fxmem.report.floor import floor_of
from fxmem.report.frontier import frontier
from fxmem.report.html import write_html
from fxmem.report.names import short_source
from fxmem.report.saved import by_module, ranges
from fxmem.report.stacked import before_and_after
from fxmem.testing import plans
from fxmem.units import format_bytes
from tests.models import blocks
from tests.report.browser import browser_or_skip, probed
from tests.report.page import Page

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 1_500_000


@pytest.fixture(scope="module")
def plan() -> Plan:
    module, args = blocks()
    return fxmem.plan(module, args, budget=0.7)


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    plan.report(path)
    return path


def peaks(page: Page) -> list[int]:
    """The most bytes that each chart shows under the pointer."""
    return [max(op[3] for op in chart["ops"]) for chart in page.data["charts"]]


def test_needs_nothing_else(path):
    page = Page(path)
    assert path.stat().st_size < LIMIT_BYTES
    assert not [ref for ref in page.references if not ref.startswith("#")]
    assert not re.search(r"@import|url\(|https?:", page.source)


def test_the_numbers_are_the_plans(path, plan):
    page = Page(path)
    for nbytes in (plan.baseline_peak_bytes, plan.budget_bytes, plan.peak_bytes):
        assert format_bytes(nbytes) in page.text
    assert peaks(page) == [plan.baseline_peak_bytes, plan.peak_bytes]
    for chart in page.data["charts"]:
        assert all(sum(parts) == nbytes for *_, nbytes, parts in chart["ops"])


def test_names_are_the_models_and_sources_are_relative(path):
    page = Page(path)
    assert "blocks.{" in page.text
    assert "tests/models.py:27" in page.text
    assert not re.search(r"primals_\d", page.source)
    assert str(ROOT) not in page.source


def test_every_kind_of_byte_is_counted_once(plan):
    for run in before_and_after(plan):
        assert np.array_equal(sum(run.bytes_of.values()), run.result.bytes_at)


@settings(max_examples=6)
@given(plans())
def test_any_plan_has_a_page(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("any") / "report.html"
    write_html(made, path)
    for run in before_and_after(made):
        assert np.array_equal(sum(run.bytes_of.values()), run.result.bytes_at)
    if made.actions:
        assert peaks(Page(path))[1] == int(made.simulation.bytes_at.max())


def test_text_of_the_model_is_escaped(plan, tmp_path):
    ops = tuple(replace(op, module="</script><b>", source="a.py:1: x < y & z") for op in plan.program.ops)
    write_html(replace(plan, program=replace(plan.program, ops=ops)), tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    assert "b" not in page.tags
    assert "</script><b>" in page.data["words"]


def test_bins_show_the_peak_whatever_their_number(plan):
    _, run = before_and_after(plan)
    for bins in (1, 7, 1000):
        at = binned(run, Axes(bins, run.result.seconds, 1))
        assert run.result.bytes_at[at].max() == plan.peak_bytes


def test_the_table_holds_every_value_and_alike_blocks_once(plan):
    groups, rows = by_module(plan), saved_tensors(plan)
    assert sum(group.nbytes for group in groups) == sum(row.nbytes for row in rows)
    assert sum(group.count * len(group.rows) for group in groups) == len(rows)
    assert max(group.count for group in groups) > 1
    for row in rows:
        assert row.reason
        assert row.decision != "recompute" or row.seconds == row.recompute_s > 0


def test_numbers_are_told_as_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == ["0-2", "5", "7-8"]


def test_the_frontier_falls_and_holds_the_plan(plan):
    points = frontier(plan, 3)
    (chosen,) = [point for point in points if point.is_chosen]
    assert (chosen.peak_bytes, chosen.extra_s, chosen.bound_s) == (plan.peak_bytes, plan.extra_s, plan.lower_bound_s)
    others = [point.extra_s for point in points if not point.is_chosen]
    assert others == sorted(others, reverse=True)
    assert points[-1].extra_s == 0
    assert all(point.bound_s <= point.extra_s and point.peak_bytes <= point.budget_bytes for point in points)


def test_the_floor_is_told_in_numbers(plan):
    floor = floor_of(plan)
    assert sum(nbytes for _, nbytes in floor.parts) == floor.peak_bytes <= plan.peak_bytes
    assert floor.op in floor.sentence
    assert any("half the batch" in way for way in floor.ways)


def test_a_returned_value_holds_the_floor():
    class WithOutput(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body = torch.nn.Linear(64, 512)

        def forward(self, x):
            logits = self.body(x)
            return logits.exp().mean(), logits

    made = fxmem.plan(WithOutput(), (torch.randn(256, 64),), None)
    assert any("is returned by forward" in way and "512.00 KiB" in way for way in floor_of(made).ways)


def test_sources_are_short():
    assert short_source(f"{ROOT}/tests/models.py:27: x = x + block(x)") == "tests/models.py:27: x = x + block(x)"
    assert short_source("/other/env/lib/python3/site-packages/pkg/mod.py:3: y") == "pkg/mod.py:3: y"
    assert short_source("/nowhere/else/model.py:3: y") == "else/model.py:3: y"
    assert short_source("not a line") == "not a line"


def test_plans_of_a_loop_share_one_page(tmp_path):
    module, args = blocks()
    step = fxmem.compile(module, budget=0.9, planner="sqrt", dynamic=False)
    for rows in (256, 128):
        step(*(x[:rows] for x in args)).backward()
    step.step.report(tmp_path / "loop.html")
    page = Page(tmp_path / "loop.html")
    assert "2 plans" in page.text
    assert len(page.data["charts"]) == 4


# In a browser.

LIGHT, DARK = "rgb(255, 255, 255)", "rgb(21, 23, 26)"


@pytest.mark.parametrize(("width", "scheme"), [(1200, 1), (390, 1), (390, 0)])
def test_in_a_browser(path, plan, width, scheme, tmp_path):
    found = probed(path, width, scheme, tmp_path)
    assert found["width"] == width
    assert not found["wide"], found["over"]
    assert found["background"] == (LIGHT if scheme else DARK)
    shown = " ".join(found["seen"])
    for text in (f"{format_bytes(plan.baseline_peak_bytes)} alive", f"{format_bytes(plan.peak_bytes)} alive"):
        assert text in shown
    assert "blocks.0.1" in shown
    assert "tests/models.py:27" in shown


def test_it_prints(path, tmp_path):
    browser_or_skip()
    printed = tmp_path / "page.pdf"
    browse(path, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    assert printed.read_bytes().startswith(b"%PDF")
