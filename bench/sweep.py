"""torch's own databases of operators and modules under `budget="min"`, and architectures at three budgets.

    python -m bench.sweep ops|modules|models [NAMES] [--sample N] [--jobs 1] [--resume FILE] [--json]

`ops`, `modules`: each case (an operator, its in-place variant, a module) on torch's sample inputs, its loss inside the
compiled function so that the operator itself may be recomputed. Gradients are compared with eager's. Outcomes: "same";
"differs"; "raises" (fxmem does, `aot_eager` doesn't: a fault, as "differs" and "died" are); "torch" (`aot_eager` raises
or differs, too); "none" (nothing to differentiate). `models`: architectures as their documentation calls them, at 0.9,
0.75 and 0.6 of the peak of eager's whole step. `--sample`: every so many-th case, always the same ones. `--resume`:
rows are appended to FILE; what is in it already is not run again. Needs the extra `fxmem[sweep]`.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import fxmem
from bench.architectures import ARCHITECTURES, model_rows, no_row
from bench.common import Row, show
from bench.isolated import each, shortened
from fxmem import compat
from fxmem.step.held_tensors import reachable_tensors

FAULTS = ("over", "differs", "raises", "died")
ORDER = (*FAULTS, "torch", "same", "none")  # of several sample inputs the first of these counts
NUM_INPUTS = 2  # of each case, at most
TOLERANCE = 1e-4  # relative and absolute: decompositions round otherwise than eager's kernels
INPLACE = " in place"

Compile = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Trial:
    """A step to take: `step(*args, **kwargs)` gives the loss."""

    step: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def gradients(self, compile_: Compile) -> Gradients:
        """The loss, and gradients of everything that can have one, in a fixed order; none are left behind."""
        leaves = [t for t in reachable_tensors((self.step, self.args, self.kwargs)) if t.is_leaf and t.requires_grad]
        torch.manual_seed(0)
        loss = compile_(self.step)(*self.args, **self.kwargs)
        loss.backward()
        found = [loss.detach(), *(leaf.grad for leaf in leaves)]
        for leaf in leaves:
            leaf.grad = None
        return found


def loss_of(outputs: Any) -> Tensor:
    """Sum of squares of whatever can be differentiated."""
    floats = [t for t in compat.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
    return sum(((torch.view_as_real(t) if t.is_complex() else t).square().sum() for t in floats), torch.zeros(()))


def detached(tree: Any) -> Any:
    """The same with its tensors as leaves: some samples are computed from others, by a graph that can be used once."""
    leaves, rebuild = compat.flatten(tree)
    return rebuild([x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves])


def op_trials(name: str) -> Iterator[Trial]:
    """Sample inputs of an operator; in place it works on a temporary copy of its input."""
    info = ops()[name.removesuffix(INPLACE)]
    function: Callable[..., Any] = info.get_inplace() if name.endswith(INPLACE) else info.op
    for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=True), NUM_INPUTS):
        after = sample.output_process_fn_grad

        def step(x: Any, *args: Any, function: Any = function, after: Any = after, **kwargs: Any) -> Tensor:
            return loss_of(after(function(x * 1 if isinstance(x, Tensor) else x, *args, **kwargs)))

        yield Trial(step, *detached(((sample.input, *sample.args), sample.kwargs)))


def module_trials(name: str) -> Iterator[Trial]:
    """Sample inputs of a module, in training mode."""
    info = modules()[name]
    inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)
    for sample in itertools.islice(inputs, NUM_INPUTS):
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)

        def step(*args: Any, module: Any = module, **kwargs: Any) -> Tensor:
            return loss_of(module(*args, **kwargs))

        yield Trial(step, *detached((sample.forward_input.args, sample.forward_input.kwargs)))


@cache
def ops() -> dict[str, Any]:
    """torch's operators that can be differentiated, by name."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {op.formatted_name: op for op in op_db if op.supports_autograd and op.supports_dtype(torch.float32, "cpu")}


@cache
def modules() -> dict[str, Any]:
    """torch's modules, by name."""
    from torch.testing._internal.common_modules import module_db

    return {info.formatted_name: info for info in module_db}


def names_of(kind: str) -> list[str]:
    """Every case of a kind."""
    if kind == "models":
        return list(ARCHITECTURES)
    if kind == "modules":
        return list(modules())
    return [name for op in ops() for name in (op, op + INPLACE) if name == op or ops()[op].get_inplace()]


def sampled(names: Sequence[str], num: int | None) -> list[str]:
    """About `num` of them, evenly."""
    return list(names) if num is None else list(names[:: max(1, len(names) // num)][:num])


def case_rows(case: tuple[str, str]) -> list[Row]:
    """Rows of one (kind, name) in this process; of an operator or module one: its worst outcome."""
    kind, name = case
    if kind == "models":
        return model_rows(name)
    started = time.perf_counter()
    outcomes = []
    torch.manual_seed(0)
    for trial in op_trials(name) if kind == "ops" else module_trials(name):
        outcomes.append(_outcome(trial))
        torch.compiler.reset()
    outcome, detail = min(outcomes, key=lambda o: ORDER.index(o[0]), default=("none", "no sample input"))
    return [{"case": name, "outcome": outcome, "detail": detail, "seconds": time.perf_counter() - started}]


def _outcome(trial: Trial) -> tuple[str, str]:
    try:
        expected = trial.gradients(lambda step: step)
    except Exception as error:
        return "none", shortened(error)
    ours = _tried(trial, lambda step: fxmem.compile(step, "min"), expected)
    if ours is None:
        return "same", ""
    torch.compiler.reset()
    theirs = _tried(trial, lambda step: torch.compile(step, backend="aot_eager"), expected)
    return ("torch", f"aot_eager: {theirs[1]}") if theirs is not None else ours


def _tried(trial: Trial, compile_: Compile, expected: Gradients) -> tuple[str, str] | None:
    """None if the gradients are those expected, else outcome and detail."""
    try:
        found = trial.gradients(compile_)
    except Exception as error:
        return "raises", shortened(error)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if (a is None) != (b is None):
            return "differs", f"gradient {i} is {'missing' if a is None else 'new'}"
        if a is not None and b is not None and not _close(a, b):
            return "differs", f"{'gradient' if i else 'loss'} {i} by {float((a - b).abs().max()):.3g}"
    return None


def _close(found: Tensor, expected: Tensor) -> bool:
    if found.layout != torch.strided or expected.layout != torch.strided:
        return bool(torch.equal(found.to_dense(), expected.to_dense()))
    return bool(torch.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True))


def rows(
    kind: str, names: Sequence[str], jobs: int = 1, timeout_s: float = 300, on_row: Callable[[Row], None] | None = None
) -> Iterator[Row]:
    """Rows of the cases, in processes of their own. Operators and modules share a cost cache, empty at first."""
    with tempfile.TemporaryDirectory() as folder:
        cases = [(kind, name) for name in names]
        num_calls = 1 if kind == "models" else 50
        for (_, name), outcome in each(case_rows, cases, timeout_s, jobs, num_calls, {"FXMEM_CACHE": folder}):
            died = {"outcome": "died", "detail": outcome.error}
            for row in outcome.value or [{**(no_row(name) if kind == "models" else {"case": name}), **died}]:
                if on_row is not None:
                    on_row(row)
                yield row


def _known(path: Path | None) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []


def _summary(found: Sequence[Row]) -> None:
    for row in found:
        if row["outcome"] in (*FAULTS, "infeasible"):
            click.echo(f"{row['outcome']:10} {row['case']} {row.get('share', '')}: {row['detail']}")
    click.echo(", ".join(f"{count} {name}" for name, count in Counter(row["outcome"] for row in found).most_common()))


@click.command()
@click.argument("kind", type=click.Choice(["ops", "modules", "models"]))
@click.argument("names", nargs=-1)
@click.option("--sample", type=int, help="about so many cases, always the same ones")
@click.option("--jobs", default=1, show_default=True, help="processes side by side")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="seconds for a case")
@click.option("--resume", type=click.Path(path_type=Path, dir_okay=False), help="file of rows: go on where it ends")
@click.option("--json", "as_json", is_flag=True)
def main(
    kind: str, names: Sequence[str], sample: int | None, jobs: int, timeout_s: float, resume: Path | None, as_json: bool
) -> None:
    """torch's operators and modules, and architectures, under budgets."""
    found = _known(resume)
    done = {row["case"] for row in found}
    todo = [name for name in names or sampled(names_of(kind), sample) if name not in done]

    def note(row: Row) -> None:
        click.echo(f"{row['case']}: {row['outcome']} {row['detail']}", err=True)
        if resume is not None:
            with resume.open("a") as file:
                file.write(json.dumps(row) + "\n")

    found += rows(kind, todo, jobs, timeout_s, note)
    if as_json or kind == "models":
        brief = found if as_json else [{k: v for k, v in row.items() if k != "detail"} for row in found]
        show(brief, as_json, "architectures under budgets")
    if not as_json:
        _summary(found)
    sys.exit(any(row["outcome"] in FAULTS for row in found))


if __name__ == "__main__":
    main()
