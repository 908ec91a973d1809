"""`fxmem explain`: where the bytes of a training step go, the cheapest ways lower, and the lines to change."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from fxmem.budget import resolve_budget
from fxmem.cli.arguments import load_model, parse_budget
from fxmem.cli.edits import Edit, edits
from fxmem.cli.first_backward import Found, first_step
from fxmem.cli.ways import Planner, Way, round_up, ways
from fxmem.errors import OptionError
from fxmem.planners.plan import Plan
from fxmem.report.decisions import standing_at_peak
from fxmem.report.names import line_of, short_path
from fxmem.report.stacked import before_and_after
from fxmem.schedule import Compute, Recompute
from fxmem.units import format_bytes

NUM_STORAGES = 10
_SHARE = 0.5
"""Of the way from the peak down to the smallest budget: what is proposed where nobody names a budget."""


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


@click.command(short_help="Where is the peak, and what is lower?")
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
    planner = Planner(plan)
    least = planner.least()
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
        ways=tuple(ways(planner, least)),
        min_bytes=least.peak_bytes,
        half_batch_bytes=_at_half_the_batch(plan),
        budget=_budget(planner, least, budget),
    )


def _budget(planner: Planner, least: Plan, asked: str | None) -> str:
    """As it is written in a script: what was asked for, or a round number halfway down."""
    if asked is None:
        peak_bytes = planner.plan.peak_bytes
        return round_up(peak_bytes - int(_SHARE * (peak_bytes - least.peak_bytes)))
    limit = resolve_budget(parse_budget(asked))
    if isinstance(limit, (int, float)):
        planner.under(limit)
    return asked


def _at_half_the_batch(plan: Plan) -> int:
    """About: what does not grow with the batch stays, the rest is halved."""
    before, _ = before_and_after(plan)
    step = before.result.peak_step
    fixed = sum(int(before.bytes_of[kind][step]) for kind in ("parameters", "gradients", "beside the graph"))
    return fixed + (plan.peak_bytes - fixed) // 2


def _print(made: Explanation, what: str) -> None:
    console = Console()
    where = f" of {made.module}" * bool(made.module) + f" ({made.line})" * bool(made.line)
    console.print(f"The step needs {format_bytes(made.peak_bytes)}, at its peak {made.op}{where} runs.", soft_wrap=True)
    console.print(_table("the largest that stand there", ("bytes", "kind", "line", "what"), [
        [format_bytes(row["bytes"]), row["kind"], Path(row["line"]).name, _of_module(row)] for row in made.largest
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
        click.echo(f'The line to add:\n  model = fxmem.compile(model, budget="{made.budget}")')


def _of_module(row: dict[str, Any]) -> str:
    return f"{row['what']} of {row['module']}" if row["module"] else str(row["what"])


def _table(title: str, head: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in head:
        is_number, is_last = name in ("bytes", "peak", "extra time"), name == head[-1]
        table.add_column(name, justify="right" if is_number else "left", no_wrap=not is_last, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
