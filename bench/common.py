"""What the benches on real models share: gradients, tables, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fxmem
from fxmem.units import format_bytes

Row = dict[str, Any]


def gradients(module: nn.Module, step: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
    """Gradients of one call of `step`, which trains `module`; leaves none behind."""
    module.zero_grad()
    step(*args).backward()
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found


def relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Norm of the difference over the norm, all gradients together."""
    assert len(found) == len(expected)
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, expected, strict=True))
    return float((difference / sum(float(b.double().square().sum()) for b in expected)) ** 0.5)


def parts_of(plan: fxmem.Plan) -> str:
    """Into how many parts each region is split, and whether its gradients are made in forward."""
    return "; ".join(f"{f.num_parts}{' fused' if f.fuse else ''}" for f in plan.program.fissions)


def show(rows: Iterable[Row], as_json: bool, title: str) -> None:
    """Rows as one JSON list, or as a table."""
    rows = list(rows)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(width=160).print(table)


def _cell(name: str, value: Any) -> str:
    if isinstance(value, (int, float)) and name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
