"""The page of a pipeline: every rank's schedule and memory, as foretold."""

from itertools import pairwise

import pytest

import fxmem
from fxmem.units import format_bytes
from tests.report.page import Page
from tests.zoo import build


@pytest.fixture(scope="module")
def pipe():
    module, args = build("mlp")
    return fxmem.pipeline(module, args, 0.9, num_stages=2, num_microbatches=2, schedule="1f1b-n")


def test_lanes_peak_where_the_ranks_do(pipe):
    assert tuple(max(segment.peak_bytes for segment in lane) for lane in pipe.plan.lanes) == pipe.plan.peak_bytes
    assert max(segment.end_s for lane in pipe.plan.lanes for segment in lane) == pytest.approx(pipe.plan.step_s)
    for lane in pipe.plan.lanes:
        assert sorted(segment.kind for segment in lane) == ["B", "B", "F", "F", "start"]
        assert all(before.end_s <= after.start_s for before, after in pairwise(lane))


def test_a_page_for_every_rank(pipe, tmp_path):
    pipe.report(tmp_path / "pipeline.html")
    page = Page(tmp_path / "pipeline.html")
    for rank, peak_bytes in enumerate(pipe.plan.peak_bytes):
        assert f"Rank {rank}: {format_bytes(peak_bytes)}" in page.text
    shown = [max(op[3] for op in chart["ops"]) for chart in page.data["charts"]]
    assert tuple(shown) == pipe.plan.peak_bytes
    assert "forward of microbatch 1, stage 0" in str(page.data)
    assert not page.references
