"""A plan as one self-contained HTML page: memory timeline, streams, saved tensors, what stands at the peak."""

from __future__ import annotations

import html
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fxmem.planners.plan import Plan, baseline_actions
from fxmem.planners.problem import reduce_program
from fxmem.report.decisions import saved_tensors, standing_at_peak
from fxmem.report.text import figure_rows
from fxmem.schedule import SimResult, simulate
from fxmem.units import format_bytes

_STYLE = """
body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px}
td,th{padding:2px 12px 2px 0;text-align:left;border-bottom:1px solid #ddd}
td:first-child{text-align:right;white-space:nowrap}
"""


def write_html(plan: Plan, path: Path) -> None:
    """Write the report of `plan` to `path`; it needs no network to be read."""
    figure = _timeline(plan)
    body = [
        f"<h1>fxmem: {html.escape(plan.program.name)}, planner {html.escape(plan.planner)}</h1>",
        _table([], figure_rows(plan)),
        "<h2>Bytes on the device while the step runs</h2>",
        figure.to_html(full_html=False, include_plotlyjs=True),
        "<h2>What stands at the peak</h2>",
        _table(
            ["bytes", "value", "kind", "source"],
            [(format_bytes(row.nbytes), row.name, row.kind, row.source) for row in standing_at_peak(plan)[:40]],
        ),
        "<h2>Values backward needs</h2>",
        _table(
            ["bytes", "value", "op", "decision", "recompute", "not offloaded because", "source"],
            [
                (
                    format_bytes(s.nbytes),
                    s.name,
                    s.target,
                    s.decision,
                    f"{s.recompute_s * 1e3:.3f} ms",
                    s.stays,
                    s.source,
                )
                for s in saved_tensors(plan)
            ],
        ),
    ]
    page = f"<!doctype html><meta charset=utf-8><title>fxmem plan</title><style>{_STYLE}</style>{''.join(body)}"
    path.write_text(page)


def _timeline(plan: Plan) -> go.Figure:
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.75, 0.25], vertical_spacing=0.06)
    baseline = simulate(plan.program, baseline_actions(reduce_program(plan.program)))
    for name, result in (("no plan", baseline), (plan.planner, plan.simulation)):
        steps = {span.step: span.start_s for span in result.spans if span.stream == "compute"}
        figure.add_scatter(
            x=list(steps.values()),
            y=[int(result.bytes_at[step]) / 2**20 for step in steps],
            name=name,
            line={"shape": "hv"},
            row=1,
            col=1,
        )
    if plan.budget_bytes is not None:
        figure.add_hline(plan.budget_bytes / 2**20, line_dash="dash", annotation_text="budget", row=1, col=1)
    _add_streams(figure, plan.simulation)
    figure.update_yaxes(title_text="MiB", row=1, col=1)
    figure.update_xaxes(title_text="simulated seconds", row=2, col=1)
    figure.update_layout(height=600, margin={"t": 30}, barmode="overlay")
    return figure


def _add_streams(figure: go.Figure, result: SimResult) -> None:
    for stream in dict.fromkeys(span.stream for span in result.spans):
        spans = [span for span in result.spans if span.stream == stream]
        figure.add_bar(
            base=[span.start_s for span in spans],
            x=[span.end_s - span.start_s for span in spans],
            y=[stream] * len(spans),
            orientation="h",
            name=stream,
            showlegend=False,
            row=2,
            col=1,
        )


def _table(head: list[str], rows: list[tuple[str, ...]]) -> str:
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{''.join(lines)}</table>"
