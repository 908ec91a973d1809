"""What pages are made of: the page itself, figures, legends, tables, lanes, labels."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fxmem.report.chart import HEIGHT, Axes, Words
from fxmem.report.stacked import KINDS
from fxmem.units import format_bytes

BINS = 1000
_COLUMNS = {"#": ' class="n"', "=": ' class="k"'}
_FOLDER = Path(__file__).parent


class Page:
    """One page under construction: sections, and the numbers that its script shows under the pointer."""

    def __init__(self, title: str, bins: int = BINS) -> None:
        self.title, self.bins = title, bins
        self.words = Words()
        self.charts: list[dict[str, Any]] = []
        self.body: list[str] = []

    def add(self, *parts: str) -> None:
        self.body += parts

    def chart(self, image: str, labels: str, shown: dict[str, Any] | None = None, kind: str = "") -> str:
        """A box with an image that answers to the pointer if there is something to show."""
        attribute = ""
        if shown is not None:
            attribute = f' data-chart="{len(self.charts)}"'
            self.charts.append(shown)
        return f'<div class="chart {kind}"{attribute}>{image}{labels}</div>'

    def __str__(self) -> str:
        data = {"kinds": KINDS, "words": self.words.all, "bins": self.bins, "charts": self.charts}
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
        style, script = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self.title)}</title><style>{style}</style></head><body>"
            f"<h1>{html.escape(self.title)}</h1>{''.join(self.body)}"
            f'<script type="application/json" id="data">{text}</script><script>{script}</script></body></html>'
        )


def figures(rows: Iterable[Sequence[str]]) -> str:
    """(name, value) pairs as cards."""
    cards = (f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in rows)
    return f'<dl class="figures">{"".join(cards)}</dl>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(name, colour) pairs."""
    items = (f'<li><i style="background:var(--{colour})"></i>{html.escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def y_labels(axes: Axes, budget_bytes: int | None) -> str:
    """The top, the middle, and the budget."""
    found = [(nbytes, format_bytes(nbytes), "") for nbytes in (axes.top_bytes, axes.top_bytes // 2)]
    if budget_bytes is not None:
        found = [label for label in found if abs(label[0] - budget_bytes) > axes.top_bytes / 10]
        found.append((budget_bytes, f"budget {format_bytes(budget_bytes)}", ";left:auto;right:0"))
    return "".join(
        f'<span class="y" style="top:{axes.y(nbytes) / HEIGHT:.1%}{place}">{text}</span>'
        for nbytes, text, place in found
    )


def seconds(value: float) -> str:
    """1.5 s, 20.1 ms, 3.0 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def bullets(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def box(name: str, image: str) -> str:
    """A lane with its name above it."""
    return f'<div class="lane"><span>{html.escape(name)}</span><div>{image}</div></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; a heading that begins with # is of a column of numbers, with = of words that are not broken."""
    kinds = [_COLUMNS.get(name[0], "") for name in head]
    titles = "".join(f"<th{kind}>{name.lstrip('#=')}</th>" for name, kind in zip(head, kinds, strict=True))
    lines = (
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    plain = ' class="plain"' * all(name.startswith("#") for name in head)
    return f"<table{plain}><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
