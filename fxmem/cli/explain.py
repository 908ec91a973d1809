"""`fxmem explain`: where the bytes of a training step go, the cheapest ways lower, and the lines to change."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from fxmem.analysis.doctor import machine
from fxmem.budget import resolve_budget
from fxmem.cli.arguments import load_model, parse_budget
from fxmem.cli.edits import Edit, edits
from fxmem.cli.first_backward import Found, first_step
from fxmem.errors import FxmemError, OptionError
from fxmem.passes.offload import why_not_offloadable
from fxmem.planners import Options
from fxmem.planners.plan import Plan, make_plan
from fxmem.report.decisions import standing_at_peak
from fxmem.report.frontier import SOLVE_S, frontier, smallest
from fxmem.report.names import line_of, short_path
from fxmem.report.stacked import before_and_after
from fxmem.schedule import Compute, Recompute
from fxmem.units import format_bytes, unit_of

NUM_STORAGES = 10
_SHARE = 0.5
"""Of the way from the peak down to the smallest budget: what is proposed where nobody names a budget."""


@dataclass(frozen=True)
class Way:
    """A way lower: predicted peak, and the extra time as a share of the step."""

    what: str
    peak_bytes: int
    extra_share: float


@dataclass(frozen=True)
class Explanation:
    """`peak_bytes` of the step as it is, while `op` of `module` at `line` runs; `largest` of what stands there."""

    peak_bytes: int
    op: str
    module: str
    line: str
    largest: tuple[dict[str, Any], ...]
    ways: tuple[Way, ...]
    min_bytes: int
    half_batch_bytes: int
    budget: str
    lines: tuple[Edit, ...] = ()


@click.command()
@click.argument("what", metavar="MODEL|SCRIPT.py")
@click.argument("arguments", nargs=-1)
@click.option("--budget", help='what the lines to change name: bytes, "6GiB", a fraction (default: halfway down)')
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True, help="of a zoo model")
@click.option("--json", "as_json", is_flag=True, help="print one JSON document")
def explain(what: str, arguments: tuple[str, ...], budget: str | None, size: str, as_json: bool) -> None:
    """Where is the peak, what stands there, and what are the cheapest ways lower?

    MODEL: a name of the zoo, or package.module:function that returns (model, args). SCRIPT.py (with ARGUMENTS for it)
    is run until its first backward has ended; the lines to change in it are shown.
    """
    import fxmem

    if not what.endswith(".py"):
        function, args = load_model(what, size)
        made = explained(fxmem.plan(function, args), budget)
    else:
        if not Path(what).is_file():
            raise OptionError(f"there is no script {what}")
        found = first_step(Path(what), arguments)
        made = _of_script(Path(what), found, budget)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(made), indent=2))
    else:
        _print(made, what)


def _of_script(script: Path, found: Found, budget: str | None) -> Explanation:
    import fxmem

    call = found.call
    if found.failure is not None:
        click.echo(f"{script} ended before a backward: {type(found.failure).__name__}: {found.failure}", err=True)
    plan = fxmem.plan(call.module, call.args, kwargs=call.kwargs, optimizer=found.optimizer)
    made = explained(plan, budget)
    return dataclasses.replace(made, lines=tuple(edits(script.read_text(encoding="utf-8"), call.place, made.budget)))


def explained(plan: Plan, budget: str | None = None) -> Explanation:
    """What is to be said of `plan`, the step as it is. Raises OptionError, BudgetInfeasible for a budget too small."""
    step = plan.simulation.peak_step
    action = plan.actions[step] if plan.actions else None
    op = plan.program.ops[action.op] if isinstance(action, (Compute, Recompute)) else None
    least = smallest(plan)
    largest = [
        {"bytes": row.nbytes, "what": row.name, "kind": row.kind, "module": row.module, "line": line_of(row.source)}
        for row in standing_at_peak(plan)[:NUM_STORAGES]
    ]
    return Explanation(
        peak_bytes=plan.peak_bytes,
        op=op.shown if op else "",
        module=op.module if op else "",
        line=line_of(op.source) if op else "",
        largest=tuple(largest),
        ways=tuple(_ways(plan, least)),
        min_bytes=least.peak_bytes,
        half_batch_bytes=_at_half_the_batch(plan),
        budget=_budget(plan, least, budget),
    )


def _budget(plan: Plan, least: Plan, asked: str | None) -> str:
    """As it is written in a script: what was asked for, or a round number halfway down."""
    if asked is None:
        return _round_up(plan.peak_bytes - int(_SHARE * (plan.peak_bytes - least.peak_bytes)))
    limit = resolve_budget(parse_budget(asked))
    if isinstance(limit, (int, float)):
        make_plan(plan.program, limit, "auto", Options(SOLVE_S))
    return asked


def _round_up(nbytes: int) -> str:
    """Three digits at least, in a unit that budgets know."""
    unit, size = unit_of(nbytes)
    value = nbytes / size
    return f"{math.ceil(value)}{unit}" if value >= 100 or unit == "B" else f"{math.ceil(value * 100) / 100:g}{unit}"


def _ways(plan: Plan, least: Plan) -> list[Way]:
    """The best budget for what it costs, the smallest one, and that one with offloading: the cheapest first."""
    points = [p for p in frontier(plan, 4) if least.peak_bytes < p.peak_bytes < plan.peak_bytes]
    best = sorted(points, key=lambda p: p.extra_s / (plan.peak_bytes - p.peak_bytes))[:1]
    named = [("recompute", p.budget_bytes, p.peak_bytes, p.extra_s) for p in best]
    if least.peak_bytes < plan.peak_bytes:
        named.append(("recompute to the smallest budget", least.peak_bytes, least.peak_bytes, least.extra_s))
    found = [Way(f'{what}, budget="{_round_up(b)}"', peak, _share(extra_s, plan)) for what, b, peak, extra_s in named]
    return sorted([*found, *_offloading(plan, least)], key=lambda way: way.extra_share)


def _offloading(plan: Plan, least: Plan) -> list[Way]:
    """Offloading under the smallest budget that recomputing alone can keep."""
    if plan.joint is None:
        return []
    pinned = frozenset(why_not_offloadable(plan.joint, plan.program))
    with contextlib.suppress(FxmemError):
        options = Options(SOLVE_S, ("disk",), machine(("disk",)), pinned)
        made = make_plan(plan.program, least.peak_bytes, "auto", options)
        if made.simulation.bytes_moved:
            moved, limit = format_bytes(made.simulation.bytes_moved), _round_up(least.peak_bytes)
            what = f'offload, budget="{limit}", tiers="disk": {moved} moved'
            return [Way(what, made.peak_bytes, _share(made.extra_s, plan))]
    return []


def _at_half_the_batch(plan: Plan) -> int:
    """About: what does not grow with the batch stays, the rest is halved."""
    before, _ = before_and_after(plan)
    step = before.result.peak_step
    fixed = sum(int(before.bytes_of[kind][step]) for kind in ("parameters", "gradients", "beside the graph"))
    return fixed + (plan.peak_bytes - fixed) // 2


def _share(extra_s: float, plan: Plan) -> float:
    return extra_s / plan.baseline_s if plan.baseline_s else 0.0


def _print(made: Explanation, what: str) -> None:
    console = Console()
    where = f" of {made.module}" * bool(made.module) + f" ({made.line})" * bool(made.line)
    console.print(f"The step needs {format_bytes(made.peak_bytes)}, at its peak {made.op}{where} runs.", soft_wrap=True)
    console.print(_table("the largest that stand there", ("bytes", "what", "kind", "module", "line"), [
        [format_bytes(row["bytes"]), row["what"], row["kind"], row["module"], row["line"]] for row in made.largest
    ]))  # fmt: skip
    console.print(_table("ways lower, the cheapest first", ("peak", "extra time", "how"), [
        [format_bytes(way.peak_bytes), f"{way.extra_share:.1%}", way.what] for way in made.ways
    ]))  # fmt: skip
    half = format_bytes(made.half_batch_bytes)
    console.print(f"Half the batch needs about {half}, in twice the number of steps.", soft_wrap=True)
    if made.lines:
        click.echo(f"Lines to add to {short_path(what)}:")
        for edit in made.lines:
            click.echo(f"  after line {edit.after}: {edit.text}")
    else:
        click.echo(f'  model = fxmem.compile(model, budget="{made.budget}")')


def _table(title: str, head: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in head:
        table.add_column(name, justify="right" if name in ("bytes", "peak", "extra time") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
