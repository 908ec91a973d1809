"""Charts as SVG, drawn here: stacked bytes over time, lanes, curves. Their size is that of the bins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from fxmem.report.names import line_of
from fxmem.report.regions import part_shown
from fxmem.report.stacked import KINDS, Kind, Run
from fxmem.schedule import Compute, Recompute, StartBackward

HEIGHT = 1000
"""Of every chart, in units of its own; the page stretches it."""
COLOURS: dict[Kind, str] = {
    "parameters": "parameters", "beside the graph": "beside", "inputs": "inputs", "gradients": "gradients",
    "outputs": "outputs", "saved": "saved", "recomputed": "recomputed", "in transfer": "transfer",
    "parts of a split region": "parts", "temporary": "temporary",
}  # fmt: skip
"""Kind -> its variable in page.css."""
LANES = ("forward", "backward", "recomputed", "wait")
"""What the compute stream does; also the names of the colours."""
PARTS = ("parts", "parts-next")
"""Colours of parts that follow each other."""


@dataclass(frozen=True)
class Axes:
    """What all charts of a plan share: bins over `seconds`, `top_bytes` at the top."""

    bins: int
    seconds: float
    top_bytes: int

    def y(self, nbytes: float) -> int:
        return HEIGHT - round(HEIGHT * nbytes / max(self.top_bytes, 1))

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0


@dataclass
class Words:
    """Texts that many ops share, each once."""

    all: list[str] = field(default_factory=lambda: [""])
    _at: dict[str, int] = field(default_factory=lambda: {"": 0})

    def number(self, text: str) -> int:
        if text not in self._at:
            self._at[text] = len(self.all)
            self.all.append(text)
        return self._at[text]


def edges(run: Run) -> list[float]:
    """When each action begins, and when the last one ends; action numbers where ops have no seconds."""
    if not run.result.seconds:
        return [float(step) for step in range(len(run.actions) + 1)]
    begins = {span.step: span for span in run.result.spans if span.stream == "compute"}
    now, found = 0.0, []
    for step in range(len(run.actions)):
        now = begins[step].start_s if step in begins else now
        found.append(now)
        now = begins[step].end_s if step in begins else now
    return [*found, run.result.seconds]


def binned(run: Run, axes: Axes) -> npt.NDArray[np.int64]:
    """For each bin the action with the most bytes among those that run then; -1 after the end."""
    at = np.full(axes.bins, -1, dtype=np.int64)
    times, level = edges(run), run.result.bytes_at
    for step in range(len(run.actions)):
        first = min(int(axes.share(times[step]) * axes.bins), axes.bins - 1)
        last = max(first, min(int(np.ceil(axes.share(times[step + 1]) * axes.bins)) - 1, axes.bins - 1))
        here = at[first : last + 1]
        here[(here < 0) | (level[here] < level[step])] = step
    return at


def stack(run: Run, at: npt.NDArray[np.int64], axes: Axes, budget_bytes: int | None, title: str) -> str:
    """Bytes of every kind, one upon the other, with the budget and the start of backward."""
    steps = at[at >= 0]
    layers = [(COLOURS[kind], run.bytes_of[kind][steps]) for kind in KINDS if run.bytes_of[kind].any()]
    backward = _backward_share(run, axes)
    boundary = [] if backward is None else [f'<path class="boundary" d="M{round(backward * axes.bins)} 0V{HEIGHT}"/>']
    return areas(layers, axes, budget_bytes, title, boundary)


def areas(
    layers: Sequence[tuple[str, npt.NDArray[np.int64]]],
    axes: Axes,
    budget_bytes: int | None,
    title: str,
    marks: Sequence[str] = (),
) -> str:
    """(colour, bytes of every bin) one upon the other, the budget as a line, and `marks` on top."""
    tops = np.cumsum([heights for _, heights in layers], axis=0)
    paths = [
        f'<path fill="var(--{colour})" d="{_area([axes.y(top) for top in row])}"/>'
        for (colour, _), row in zip(layers, tops, strict=True)
    ]
    line = [] if budget_bytes is None else [f'<path class="budget" d="M0 {axes.y(budget_bytes)}h{axes.bins}"/>']
    return svg(axes.bins, HEIGHT, [*reversed(paths), *line, *marks], title)


def _backward_share(run: Run, axes: Axes) -> float | None:
    """Where backward begins, from 0 to 1."""
    times = edges(run)
    step = next((i for i, action in enumerate(run.actions) if isinstance(action, StartBackward)), None)
    return axes.share(times[step]) if step is not None else None


def _area(tops: Sequence[int]) -> str:
    """A step curve down to the bottom."""
    return f"M0 {HEIGHT}{_steps(tops)}V{HEIGHT}z"


def _steps(tops: Sequence[int]) -> str:
    return "".join(f"V{top}h{len(list(same))}" for top, same in groupby(tops))


def svg(width: int, height: int, parts: Iterable[str], title: str) -> str:
    """An image that the page stretches to its box; `title` is what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f"{''.join(parts)}</svg>"
    )


def hover(run: Run, at: npt.NDArray[np.int64], words: Words) -> dict[str, Any]:
    """What the page shows of the op under the pointer: bin -> op; op -> name, module, line, bytes, bytes by kind."""
    steps = list(dict.fromkeys(int(step) for step in at if step >= 0))
    number = {step: position for position, step in enumerate(steps)}
    return {"at": [number.get(int(step), -1) for step in at], "ops": [_op(run, step, words) for step in steps]}


def _op(run: Run, step: int, words: Words) -> list[Any]:
    action = run.actions[step]
    parts = [int(run.bytes_of[kind][step]) for kind in KINDS]
    nbytes = int(run.result.bytes_at[step])
    if not isinstance(action, (Compute, Recompute)):
        return [action_shown(run, step), 0, 0, nbytes, parts]
    op = run.program.ops[action.op]
    return [action_shown(run, step), words.number(op.module), words.number(line_of(op.source)), nbytes, parts]


def action_shown(run: Run, step: int) -> str:
    """An action for people: the op's name, or what is moved."""
    action = run.actions[step]
    if isinstance(action, (Compute, Recompute)):
        return part_shown(run.program, run.program.ops[action.op]) + " (again)" * isinstance(action, Recompute)
    storage = getattr(action, "storage", None)
    if storage is None:
        return "backward starts"
    return f"{type(action).__name__.lower()} {part_shown(run.program, run.program.ops[run.program.producer[storage]])}"


def compute_lane(run: Run, axes: Axes) -> str:
    """When the device computes forward, backward, again, and when it waits."""
    times = edges(run)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in LANES}
    computed = {span.step: (span.start_s, span.end_s) for span in run.result.spans if span.stream == "compute"}
    for step, action in enumerate(run.actions):
        if isinstance(action, (Compute, Recompute)):
            name = "recomputed" if isinstance(action, Recompute) else run.program.ops[action.op].region
            at = computed[step] if run.result.seconds else (times[step], times[step + 1])
            spans[name].append(at)
    busy = sorted(at for found in spans.values() for at in found)
    spans["wait"] = list(_gaps(busy, times[-1]))
    return lane(spans, axes)


def region_lane(run: Run, number: int, axes: Axes) -> str:
    """When one split region runs, its parts in turns of two colours."""
    times = edges(run)
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in PARTS}
    for step, action in enumerate(run.actions):
        part = run.program.ops[action.op].part if isinstance(action, (Compute, Recompute)) else None
        if part is not None and part.region == number:
            spans[PARTS[part.number % 2]].append((times[step], times[step + 1]))
    return lane(spans, axes)


def _gaps(busy: Sequence[tuple[float, float]], end: float) -> Iterator[tuple[float, float]]:
    now = 0.0
    for first, last in busy:
        if first > now:
            yield now, first
        now = max(now, last)
    if now < end:
        yield now, end


def lane(spans: dict[str, list[tuple[float, float]]], axes: Axes) -> str:
    """One row of bars: name of a colour -> (start, end) of each, in seconds."""
    parts = []
    for name, found in spans.items():
        bars = _merged([(axes.share(first) * axes.bins, axes.share(last) * axes.bins) for first, last in found])
        path = "".join(f"M{first:.1f} 0h{last - first:.1f}v10h{first - last:.1f}z" for first, last in bars)
        parts.append(f'<path fill="var(--{name})" d="{path}"/>' if path else "")
    return svg(axes.bins, 10, parts, "when it is busy")


def _merged(bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Bars that are less than a quarter of a bin apart are drawn as one."""
    made: list[tuple[float, float]] = []
    for first, last in sorted(bars):
        if made and first - made[-1][1] < 0.25:
            made[-1] = made[-1][0], max(made[-1][1], last)
        else:
            made.append((first, last))
    return made


def step_curve(points: Sequence[tuple[float, float]], colour: str, is_dashed: bool = False) -> str:
    """A curve through (x, y) that keeps its height until the next point."""
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
    dashes = ' stroke-dasharray="3 3"' if is_dashed else ""
    return f'<path class="curve" stroke="var(--{colour})"{dashes} d="{path}"/>'


def dot(x: float, y: float, colour: str) -> str:
    """A round mark, however the image is stretched."""
    return f'<path class="dot" stroke="var(--{colour})" d="M{x:.1f} {y:.1f}h0"/>'
