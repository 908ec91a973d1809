"""A pipeline as one page: for every rank when it runs what, and the bytes that stand there."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fxmem.report.chart import Axes, areas, lane
from fxmem.report.page import Page, box, bullets, figures, legend, seconds, y_labels
from fxmem.units import format_bytes

IntArray = npt.NDArray[np.int64]
START = "start"
"""Kind of the segment that stands for what a rank holds before its first action."""
_NAMES = {
    START: "before the first action",
    "F": "forward",
    "B": "backward",
    "I": "inputs' gradients",
    "W": "weights' gradients",
}
_COLOURS = {"F": "forward", "B": "backward", "I": "saved", "W": "gradients"}


class Segment(NamedTuple):
    """One action of a rank: F, B, or a split backward's I and W.

    `peak_bytes` stand while it runs, `level_bytes` after it.
    """

    stage: int
    kind: str
    microbatch: int
    start_s: float
    end_s: float
    peak_bytes: int
    level_bytes: int


class PipelineFigures(NamedTuple):
    """The plan in words: one line on the whole, one on each stage; `peak_bytes` per rank."""

    head: str
    stages: tuple[str, ...]
    peak_bytes: tuple[int, ...]


def write_pipeline(
    plan: PipelineFigures, lanes: Sequence[Sequence[Segment]], budget_bytes: int | None, path: Path
) -> None:
    """Write the page to `path`; it needs no network to be read."""
    page = Page("fxmem: pipeline", max(200, min(1000, 12000 // max(len(lanes), 1))))
    end_s = max((segment.end_s for row in lanes for segment in row), default=0.0)
    top = int(1.04 * max(*plan.peak_bytes, budget_bytes or 0))
    axes = Axes(page.bins, end_s, top)
    page.add(f"<p>{html.escape(plan.head)}</p>")
    page.add(figures([(f"rank {r}", format_bytes(peak)) for r, peak in enumerate(plan.peak_bytes)]))
    page.add(f"<p>One step takes {seconds(end_s)} (simulated).</p>")
    used = dict.fromkeys(segment.kind for row in lanes for segment in row if segment.kind != START)
    page.add(legend((_NAMES[kind], _COLOURS[kind]) for kind in used))
    for rank, row in enumerate(lanes):
        page.add(f"<h2>Rank {rank}: {format_bytes(plan.peak_bytes[rank])}</h2>")
        page.add(*_rank(page, row, axes, budget_bytes))
    page.add(f"<h2>Stages</h2>{bullets(plan.stages)}")
    path.write_text(str(page), encoding="utf-8")


def _rank(page: Page, row: Sequence[Segment], axes: Axes, budget_bytes: int | None) -> list[str]:
    spans = {_COLOURS[kind]: [(s.start_s, s.end_s) for s in row if s.kind == kind] for kind in _COLOURS}
    at, heights = _binned(row, axes)
    image = areas([("saved", heights)], axes, budget_bytes, "bytes of the rank over the step")
    ops = [[_shown(segment), 0, 0, segment.peak_bytes, []] for segment in row]
    labels = y_labels(axes, budget_bytes)
    return [
        box("schedule", lane(spans, axes)),
        page.chart(image, labels, {"at": at.tolist(), "ops": ops}, kind="low"),
    ]


def _shown(segment: Segment) -> str:
    if segment.kind == START:
        return _NAMES[START]
    return f"{_NAMES[segment.kind]} of microbatch {segment.microbatch}, stage {segment.stage}"


def _binned(row: Sequence[Segment], axes: Axes) -> tuple[IntArray, IntArray]:
    """For each bin the segment that runs then or ran last (-1 before the first), and the bytes that stand."""
    at = np.full(axes.bins, -1, dtype=np.int64)
    heights = np.zeros(axes.bins, dtype=np.int64)
    taken = -1
    for number, segment in enumerate(row):
        first = min(int(axes.share(segment.start_s) * axes.bins), axes.bins - 1)
        last = max(first, min(int(np.ceil(axes.share(segment.end_s) * axes.bins)) - 1, axes.bins - 1))
        edge = heights[first] if first <= taken else 0  # two actions in one bin: the higher one is drawn
        at[first:] = number
        heights[first : last + 1] = segment.peak_bytes
        heights[first] = max(edge, segment.peak_bytes)
        heights[last + 1 :] = segment.level_bytes
        taken = last
    return at, heights
