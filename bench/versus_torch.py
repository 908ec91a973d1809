"""fxmem against torch's own `activation_memory_budget`, on the same captured graphs, in one process.

    python -m bench.versus_torch [--models gpt2,unet,resnet50] [--json]

torch: AOTAutograd with its min-cut partitioner at every budget of the sweep. fxmem: at each measured peak of that
sweep. Peaks are the allocator's; `op_pct` is the extra op time in percent (measured seconds of each op, times how often
it runs); `wall_ratio` is the median step over the median step without a plan, alternating runs. `smallest` rows: the
smallest peak each one reaches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
import torch
from torch import fx, nn

import fxmem
from bench.common import Row, show
from fxmem import compat
from fxmem.capture import JointGraph, make_backend
from fxmem.options import Settings
from fxmem.step.graph_plan import annotated_program
from fxmem.testing import zoo

MODELS = ("gpt2", "unet", "resnet50")
SWEEP = tuple(i / 10 for i in range(11))


class TorchSweep:
    """One model captured once, compiled again for each of torch's budgets."""

    def __init__(self, module: nn.Module) -> None:
        self.run = torch.compile(module, backend=self._backend)
        self.budget = 1.0
        self.op_s: dict[str, float] = {}
        self.total_s = 0.0

    def set_budget(self, budget: float) -> None:
        """Use `activation_memory_budget=budget` from now on."""
        self.budget = budget
        with compat.retracing(self._inputs):
            self._code = make_backend(self._partition)(self._module, self._inputs)

    def _backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._module, self._inputs = module, inputs
        self._code = make_backend(self._partition)(module, inputs)
        return lambda *args: self._code(*args)

    def _partition(self, joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        if not self.op_s:
            program = annotated_program(joint, Settings(), may_run=True)
            self.op_s = {op.name: op.seconds for op in program.ops}
        num_outputs, static = joint.num_forward_outputs, joint.static_indices
        halves = compat.min_cut_partition(joint.graph_module, num_outputs, static, self.budget)
        ran = [node.name for half in halves for node in half.graph.nodes if node.op == "call_function"]
        self.total_s = sum(self.op_s.get(name, 0.0) for name in ran)
        return halves


def measured_bytes(module: nn.Module, step: Callable[..., Any], args: Sequence[Any]) -> int:
    """Allocator's peak of one step, after a warm-up."""
    step(*args).backward()
    module.zero_grad()
    peak_bytes = fxmem.measure(lambda: step(*args).backward()).peak_bytes
    module.zero_grad()
    return peak_bytes


def wall_ratio(module: nn.Module, step: Callable[..., Any], base: Callable[..., Any], args: Sequence[Any]) -> float:
    """Median of paired step times: `step` over `base`."""
    ratios = []
    for _ in range(5):
        seconds = []
        for run in (base, step):
            started = time.perf_counter()
            run(*args).backward()
            seconds.append(time.perf_counter() - started)
            module.zero_grad()
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def rows(name: str, size: zoo.Size, sweep: Sequence[float]) -> Iterator[Row]:
    """Rows of torch's sweep, each followed by fxmem's at the peak that it measured; then the smallest peaks."""
    module, args = zoo.build(name, size)
    base, step, torch_side = fxmem.compile(module), fxmem.compile(module), TorchSweep(module)
    unplanned_bytes = measured_bytes(module, base, args)
    torch_side.run(*args)
    peaks: list[int] = []
    for budget in sweep:
        torch_side.set_budget(budget)
        peak_bytes = measured_bytes(module, torch_side.run, args)
        peaks.append(peak_bytes)
        baseline_s = base.plan.baseline_s
        common = {"model": name, "torch_budget": budget, "peak_fraction": peak_bytes / unplanned_bytes}
        torch_pct = 100 * (torch_side.total_s / baseline_s - 1)
        torch_wall = wall_ratio(module, torch_side.run, base, args)
        yield {**common, "who": "torch", "peak_bytes": peak_bytes, "op_pct": torch_pct, "wall_ratio": torch_wall}
        step.set_budget(peak_bytes)
        own_bytes = measured_bytes(module, step, args)
        own_pct = 100 * step.plan.extra_s / baseline_s
        wall = wall_ratio(module, step, base, args)
        yield {**common, "who": "fxmem", "peak_bytes": own_bytes, "op_pct": own_pct, "wall_ratio": wall}
    step.set_budget("min")
    smallest = {"torch": min(peaks), "fxmem": measured_bytes(module, step, args)}
    for who, peak_bytes in smallest.items():
        common = {"model": name, "torch_budget": "smallest", "peak_fraction": peak_bytes / unplanned_bytes}
        yield {**common, "who": who, "peak_bytes": peak_bytes, "op_pct": None, "wall_ratio": None}


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True)
@click.option("--sweep", default=",".join(map(str, SWEEP)), show_default=True, help="torch's budgets")
@click.option("--json", "as_json", is_flag=True)
def main(models: str, size: zoo.Size, sweep: str, as_json: bool) -> None:
    """Measured peak, op time and wall time: torch's sweep, and fxmem at the same peaks."""
    budgets = [float(budget) for budget in sweep.split(",")]
    found = [row for name in models.split(",") for row in rows(name, size, budgets)]
    show(found, as_json, "torch's activation_memory_budget and fxmem at the same measured peak")


if __name__ == "__main__":
    main()
