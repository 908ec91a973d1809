"""Command line: `fxmem demo`, `plan`, `pipeline`, `measure`, `doctor`. `--json` on each prints one JSON document."""

from __future__ import annotations

import dataclasses
import json
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import fxmem
from fxmem.budget import Budget
from fxmem.cli.arguments import load_model, parse_budget
from fxmem.cli.explain import explain
from fxmem.cli.pipeline import pipeline
from fxmem.cli.stdout import clean_stdout
from fxmem.errors import FxmemError
from fxmem.planners.plan import Plan
from fxmem.units import format_bytes, unit_of

_BUDGET_HELP = 'bytes, "6GiB", a fraction like 0.6 of the unplanned peak, or "min"'


class _Group(click.Group):
    """Shows fxmem's own errors as messages, not as tracebacks; nothing else prints to standard output."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with clean_stdout():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FxmemError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fxmem")
def main() -> None:
    """Train under a number of bytes."""


main.add_command(pipeline)
main.add_command(explain)


def _shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every planning command takes."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="print one JSON document"),
        click.option("--solve-s", type=float, help="limit on the planner's work, in seconds of a reference core"),
        click.option("--device", "device_spec", help="plan for a device that is not here: a preset or a JSON file"),
        click.option("--offload-dir", type=click.Path(path_type=Path), help="directory of the disk tier"),
        click.option("--tiers", help="host, disk, or auto: where saved tensors may go"),
        click.option("--planner", default="auto", show_default=True),
        click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True),
    ):
        command = option(command)
    return command


@main.command(short_help="Train a model under three budgets.")
@click.argument("model", default="gpt2")
@click.option("--report", type=click.Path(path_type=Path), default=Path("fxmem-report.html"), show_default=True)
@_shared
def demo(model: str, report: Path, size: str, as_json: bool, **options: Any) -> None:
    """Train MODEL for a step without a plan and under three budgets: predicted, measured, time."""
    function, args = load_model(model, size)
    step = fxmem.compile(function, **_given(options))
    rows = [_trained(step, args, None)]
    peak_bytes, lowest_bytes = rows[0]["predicted_bytes"], _trained(step, args, "min")["predicted_bytes"]
    rows += [
        _trained(step, args, lowest_bytes + int((peak_bytes - lowest_bytes) * share)) for share in (0.66, 0.33, 0.1)
    ]
    for row in rows:
        row["extra_wall_pct"] = 100 * (row["seconds"] / rows[0]["seconds"] - 1)
    step.plan.report(report)
    if as_json:
        _print_json({"model": model, "min_bytes": lowest_bytes, "rows": rows, "report": str(report)})
        return
    title = f"one training step of {model} ({size}); smallest feasible budget {format_bytes(lowest_bytes)}"
    _print_table(title, rows)
    Console().print(f"timeline and decisions of the tightest plan: {report}")


def _trained(step: Any, args: tuple[Any, ...], budget: Budget) -> dict[str, Any]:
    """Hold `step` to `budget`, warm up, measure one step."""
    step.set_budget(budget)

    def run() -> None:
        for parameter in step.step.parameters:
            parameter.grad = None
        step(*args).backward()

    for _ in range(2):
        run()
    seconds = min(timeit.repeat(run, number=1, repeat=5))
    measured_bytes = fxmem.measure(run).peak_bytes
    plan = step.plan
    return {
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": measured_bytes,
        "extra_op_pct": 100 * plan.extra_s / plan.baseline_s,
        "bound_pct": 100 * plan.lower_bound_s / plan.baseline_s,
        "seconds": seconds,
    }


@main.command()
@click.argument("model")
@click.option("--budget", required=True, help=_BUDGET_HELP)
@click.option("--report", type=click.Path(path_type=Path), help="write an HTML report")
@click.option("--save", type=click.Path(path_type=Path), help="write the plan as JSON")
@click.option("--versus-torch", is_flag=True, help="compare with torch's activation_memory_budget (some seconds)")
@_shared
def plan(
    model: str,
    budget: str,
    report: Path | None,
    save: Path | None,
    versus_torch: bool,
    size: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Plan MODEL ahead of time; runs nothing. MODEL: a name of the zoo, or package.module:function that returns
    (model, args)."""
    function, args = load_model(model, size)
    made = fxmem.plan(function, args, budget=parse_budget(budget), **_given(options))
    beside = _torch_plans(made, function, args, options) if versus_torch else []
    if report is not None:
        made.report(report, beside)
    if save is not None:
        made.save(save)
    if as_json:
        figures = {k: v for k, v in made.to_json().items() if k not in ("actions", "program", "links")}
        torch_rows = [{"planner": p.planner, "peak_bytes": p.peak_bytes, "extra_s": p.extra_s} for p in beside]
        _print_json({**figures, "gap": made.gap, **({"versus_torch": torch_rows} if versus_torch else {})})
    else:
        click.echo(str(made))
        if versus_torch:
            _print_beside(beside)


def _torch_plans(
    made: Plan, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> list[Plan]:
    """torch's settings on the graph of `made`, captured again if `made` has it in parts only."""
    if made.program.unsplit is None:
        return made.torch_plans()
    kept = {name: value for name, value in options.items() if name == "device_spec"}
    return fxmem.plan(function, args, **_given(kept)).torch_plans()


def _print_beside(plans: list[Plan]) -> None:
    click.echo("torch's activation_memory_budget on this step, predicted:")
    table = Table()
    for name in ("setting", "peak", "extra time"):
        table.add_column(name, justify="right")
    for made in plans:
        table.add_row(made.planner.split()[-1], format_bytes(made.peak_bytes), f"{made.extra_share:.2%}")
    Console().print(table)


@main.command()
@click.argument("model")
@click.option("--budget", help=_BUDGET_HELP)
@_shared
def measure(model: str, budget: str | None, size: str, as_json: bool, **options: Any) -> None:
    """Run a step of MODEL under a budget; measure it."""
    function, args = load_model(model, size)
    step = fxmem.compile(function, **_given(options))
    row = _trained(step, args, None if budget is None else parse_budget(budget))
    _print_json(row) if as_json else _print_table(f"one training step of {model}", [row])


@main.command()
@click.option("--offload-dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True)
def doctor(offload_dir: Path | None, as_json: bool) -> None:
    """What is here: torch, devices, link bandwidth, disk."""
    from fxmem.analysis.doctor import examine

    found = dataclasses.asdict(examine(offload_dir))
    if as_json:
        _print_json(found)
        return
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for name, value in _flat("", found):
        shown = name.removesuffix("_per_s").removesuffix("_bytes").removesuffix("_s").replace("_", " ")
        table.add_row(shown, _quantity(name, value))
    Console().print(table)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is within; positions are left out of lists of one."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name} {key}".strip(), inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _flat(f"{name} {number}" if len(value) > 1 else name, inner)
    else:
        yield name, value


def _quantity(name: str, value: Any) -> str:
    """With the unit that the name ends with."""
    if not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value * 1e6:.1f} us" if name.endswith("latency_s") else str(value)


def _given(options: dict[str, Any]) -> Any:
    return {name: value for name, value in options.items() if value is not None}


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))


_HEADINGS = {
    "budget_bytes": "budget", "predicted_bytes": "predicted", "measured_bytes": "measured",
    "extra_op_pct": "extra op %", "bound_pct": "bound %", "seconds": "step s", "extra_wall_pct": "wall %",
}  # fmt: skip


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Rows of `_trained` in 80 columns: bytes in one unit, which the title names."""
    unit, divisor = unit_of(max(row["predicted_bytes"] for row in rows))
    table = Table(title=f"{title}; memory in {unit}", title_justify="left")
    for name in rows[0]:
        table.add_column(_HEADINGS[name], justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(name, value, divisor) for name, value in row.items()))
    Console().print(table)


def _cell(name: str, value: Any, divisor: int) -> str:
    if value is None:
        return "none"
    if name.endswith("_bytes"):
        return f"{value / divisor:.2f}"
    return f"{value:.2f}" if name.endswith("_pct") else f"{value:.3f}"
