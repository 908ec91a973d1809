"""Split regions in reports: which part an op is, where the parts' bytes stand, what splitting bought."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from fxmem.errors import PlanMismatch
from fxmem.planners.plan import Plan
from fxmem.report.decisions import saved_tensors
from fxmem.report.floor import floor_of
from fxmem.report.frontier import frontier
from fxmem.report.regions import bought, part_shown, regions_of
from fxmem.report.saved import by_module
from fxmem.report.stacked import before_and_after
from fxmem.units import format_bytes
from tests.report.browser import probed
from tests.report.page import Page

ROWS, CLASSES, PARTS = 256, 2048, "parts of a split region"


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 32)
        self.head = nn.Linear(32, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(x))
        return F.cross_entropy(logits, labels)


@pytest.fixture(scope="module")
def args() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return torch.randn(ROWS, 32), torch.randint(CLASSES, (ROWS,))


@pytest.fixture(scope="module")
def plan(args: tuple[torch.Tensor, ...]) -> Plan:
    made = fxmem.plan(Classifier(), args, 0.45, device_spec="cpu")
    assert made.program.fissions
    return made


def test_a_region_is_told_by_what_the_model_calls(plan):
    (region,) = regions_of(plan.program)
    (fission,) = plan.program.fissions
    assert region.name == "head to cross_entropy"
    assert region.module == "head"
    assert region.line.startswith("tests/report/test_regions.py:")
    assert region.whole_bytes == 4 * ROWS * CLASSES
    assert region.part_bytes * fission.num_parts == region.whole_bytes
    assert region.rows * fission.num_parts == ROWS
    assert f"{fission.num_parts} parts of up to {region.rows} along dimension 0" in region.sentence


def test_the_bound_is_named_as_that_of_the_split(plan, args):
    whole = fxmem.plan(Classifier(), args, device_spec="cpu")
    assert "lower bound of this split" in str(plan)
    assert "lower bound on it" in str(whole)


def test_ops_say_which_part_they_are(plan):
    (fission,) = plan.program.fissions
    numbers = {op.part.number for op in plan.program.ops if op.part}
    assert numbers == set(range(fission.num_parts))
    part = next(op for op in plan.program.ops if op.part and op.part.number == 1)
    assert part_shown(plan.program, part) == f"{part.part.op}, part 2 of {fission.num_parts}"
    assert not any(op.part for op in plan.program.unsplit.ops)


def test_bytes_of_parts_are_a_kind_of_their_own(plan):
    before, after = before_and_after(plan)
    assert before.result.peak_bytes == plan.baseline_peak_bytes
    assert not before.bytes_of[PARTS].any()
    (region,) = regions_of(plan.program)
    assert region.part_bytes <= after.bytes_of[PARTS].max() < region.whole_bytes
    for run in (before, after):
        assert (sum(run.bytes_of.values()) == run.result.bytes_at).all()


def test_the_page_shows_parts_and_regions(plan, tmp_path):
    plan.report(tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    (region,) = regions_of(plan.program)
    count = plan.program.fissions[0].num_parts
    assert f"head to cross_entropy, {count} parts" in page.text
    assert f"{format_bytes(region.part_bytes)} at once, {format_bytes(region.whole_bytes)} unsplit" in page.text
    assert bought(plan).sentence in page.text
    names = {op[0] for op in page.data["charts"][1]["ops"]}
    assert any(f", part {count} of {count}" in name for name in names)
    assert max(op[3] for op in page.data["charts"][0]["ops"]) == plan.baseline_peak_bytes
    assert str(plan).count("runs in parts") == 1
    assert region.name in str(plan).replace("\n", " ")


def test_the_page_fits_on_a_phone(plan, tmp_path):
    plan.report(tmp_path / "page.html")
    found = probed(tmp_path / "page.html", 390, 1, tmp_path)
    assert not found["wide"], found["over"]
    assert any(f"{PARTS}: " in text for text in found["seen"])


def test_what_splitting_bought_is_the_unsplit_plans(plan, args):
    found = bought(plan)
    assert found.min_bytes <= plan.peak_bytes < found.unsplit_min_bytes
    assert found.unsplit_s is None
    assert "does not fit" in found.sentence
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.plan(Classifier(), args, plan.peak_bytes, fission="off")


def test_the_frontier_is_of_both_forms(plan):
    points = frontier(plan, 3)
    assert points[0].is_split
    assert not points[-1].is_split
    assert points[-1].extra_s == 0
    assert all(point.bound_s <= point.extra_s for point in points)
    assert floor_of(plan).peak_bytes == points[0].peak_bytes


def test_parts_decided_alike_are_one_row(plan):
    rows, groups = saved_tensors(plan), by_module(plan)
    assert sum(group.nbytes for group in groups) == sum(row.nbytes for row in rows)
    names = [row.value for group in groups for row in group.rows]
    assert not any(", part " in name for name in names)


def test_plans_of_two_forms_differ_in_words(plan, args):
    whole = fxmem.plan(Classifier(), args, None)
    (region,) = regions_of(plan.program)
    assert f"runs in parts: nothing -> {region.name} in {region.fission.num_parts} parts" in whole.diff(plan)


def test_a_file_keeps_parts_and_refuses_those_of_no_region(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert regions_of(Plan.load(path).program) == regions_of(plan.program)
    data = json.loads(path.read_text())
    number = next(i for i, op in enumerate(data["program"]["ops"]) if "part" in op)
    for part in (["x", 0, 1], ["x", 99, 0], ["x", 0], [3, 0, 0]):
        data["program"]["ops"][number]["part"] = part
        path.write_text(json.dumps(data))
        with pytest.raises(PlanMismatch, match="part of op"):
            Plan.load(path)


def test_a_program_that_does_not_know_its_parts_has_a_page(plan, tmp_path):
    ops = tuple(replace(op, part=None) for op in plan.program.ops)
    made = replace(plan, program=replace(plan.program, ops=ops))
    made.report(tmp_path / "page.html")
    assert "a region, " in Page(tmp_path / "page.html").text
