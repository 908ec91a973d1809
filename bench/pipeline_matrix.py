"""Models x schedules x ranks over gloo: three training steps each, against one process that runs the same microbatches.

Every cell is planned under a budget, `SHARE` of the peak it has without one (or, where no plan is that small, the
smallest budget that the error names), with SGD with momentum. The model is captured once; all schedules of a number of
ranks run in one group of processes. Rank 0 decides, the others follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from bench.common import Row, relative_error
from bench.pipeline_ranks import run_ranks
from fxmem.errors import BudgetInfeasible
from fxmem.pipelining.decision import Driver, PipelineResult
from fxmem.pipelining.model_plan import Request
from fxmem.runtime.pipeline.batch import split_batch
from fxmem.runtime.pipeline.pipeline import Pipeline
from fxmem.runtime.pipeline.stage import Stage
from fxmem.testing.zoo import build

MODELS = ("gpt2", "llama", "t5", "resnet50", "unet")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv", "1f1b-n")
RANKS = (2, 4)
CELLS = dict.fromkeys(RANKS, SCHEDULES)
NUM_STEPS = 3
NUM_MICROBATCHES = 4
ROWS = {"resnet50": 8}
"""Of a microbatch, where it isn't 2: there the last statistics, over two values, would leave 1 and -1 of them."""
DOUBLE = frozenset({"resnet50"})
"""Run in float64: so many normalisations amplify rounding to several percent of the gradient in float32."""
SHARE = 0.9
SOLVE_S = 0.1
TIMEOUT_S = 1200


def matrix_rows(
    models: Sequence[str] = MODELS, schedules: Mapping[int, Sequence[str]] = CELLS
) -> Iterator[Row]:
    """A row for every model, number of ranks, schedule (`schedules`: by number of ranks) and rank.

    `error`: of the predicted peak, relative to the measured one; `gradient_error`: norm of the difference over the norm
    of this rank's gradients, the worst step; `loss_error`: the worst step, absolute; `failure`: why a cell did not run.
    """
    torch.set_num_threads(1)
    for model in models:
        dtype = torch.float64 if model in DOUBLE else torch.float32
        (module, args), (other, _) = build(model), build(model)
        batch = grown(args, NUM_MICROBATCHES * ROWS.get(model, 2), dtype)
        runtime = Pipeline(module.to(dtype), split_batch(batch, {}, NUM_MICROBATCHES))
        expected = steps_of_one_process(other.to(dtype), batch, NUM_MICROBATCHES, sgd(list(other.parameters())))
        for num_ranks, names in schedules.items():
            run = partial(_cells, runtime, module, batch, expected, num_ranks, names)
            found = run_ranks(num_ranks, run, TIMEOUT_S)
            for at, schedule in enumerate(names):
                for rank, cells in enumerate(found):
                    head = {"model": model, "schedule": schedule, "ranks": num_ranks, "rank": rank}
                    failure = {"failure": cells.get("error", "the cell before it failed")}
                    yield head | (cells["cells"][at] if at < len(cells.get("cells", ())) else failure)


def grown(args: Sequence[Tensor], num_rows: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Arguments like `args` with `num_rows` rows, no two alike (else batch statistics would leave no gradient)."""
    made = torch.Generator().manual_seed(1)

    def like(arg: Tensor) -> Tensor:
        shape = (num_rows, *arg.shape[1:])
        if arg.is_floating_point():
            return torch.randn(shape, generator=made, dtype=dtype)
        return torch.randint(int(arg.max()) + 1, shape, generator=made)

    return tuple(map(like, args))


def sgd(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def steps_of_one_process(
    model: nn.Module, batch: tuple[Tensor, ...], num_microbatches: int, optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Loss, gradients and (after them) buffers of `NUM_STEPS` steps of one process that runs the same microbatches."""
    steps = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = 0.0
        for part in split_batch(batch, {}, num_microbatches):
            part_loss = model(*part.args) * (part.num_rows / batch[0].shape[0])
            part_loss.backward()
            loss += part_loss.item()
        named = dict(model.named_parameters(remove_duplicate=False))
        gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        buffers = {n: b.clone() for n, b in model.named_buffers()}
        steps.append({"loss": loss, "gradients": gradients, "buffers": buffers})
        optimizer.step()
    return steps


def _cells(
    runtime: Pipeline, model: nn.Module, batch: tuple[Tensor, ...], expected: list[dict[str, Any]], num_ranks: int,
    schedules: Sequence[str], rank: int,
) -> Row:  # fmt: skip
    """What this rank found in every cell, up to the first that failed."""
    cells: list[Row] = []
    for schedule in schedules:
        try:
            plan = _planned(runtime, model, batch, num_ranks, schedule)
            cells.append(_trained(runtime, plan, model, batch, expected, rank))
        except Exception as error:
            cells.append({"failure": f"{type(error).__name__}: {error}"})
            break
    return {"cells": cells}


def _planned(
    runtime: Pipeline, model: nn.Module, batch: tuple[Tensor, ...], num_ranks: int, schedule: str
) -> PipelineResult:
    def under(budget: int | None) -> PipelineResult:
        request = Request(num_ranks, (NUM_MICROBATCHES,), budget, schedule, "auto", "auto", None, SOLVE_S)
        return Driver(lambda _: runtime, request, batch, model, sgd(list(model.parameters()))).run()

    try:
        return under(int(SHARE * max(under(None).peak_bytes)))
    except BudgetInfeasible as error:
        return under(error.min_bytes)


def _trained(
    runtime: Pipeline, plan: PipelineResult, model: nn.Module, batch: tuple[Tensor, ...],
    expected: list[dict[str, Any]], rank: int,
) -> Row:  # fmt: skip
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}
    made = runtime.stage(rank, state_dict=state)
    stages = [made] if isinstance(made, Stage) else made
    steps = runtime.schedule(made)
    named = {n: p for stage in stages for n, p in stage.submod.named_parameters(remove_duplicate=False)}
    trained = [n for n in named if n in expected[0]["gradients"]]
    optimizer = sgd([*dict.fromkeys(named[n] for n in trained)] or [torch.zeros(0)])  # a stage may have no parameters
    gradient_error = loss_error = buffer_error = 0.0
    measured: list[int] = []
    for wanted in expected:
        optimizer.zero_grad()
        losses: list[Tensor | None] = []
        measured.append(_peak_bytes(steps, batch, optimizer, losses))
        found, right = ([named[n].grad for n in trained], [wanted["gradients"][n] for n in trained])
        gradient_error = max(gradient_error, relative_error(found, right) if trained else 0.0)  # type: ignore[arg-type]
        if losses[0] is not None:
            loss_error = max(loss_error, abs(losses[0].item() - wanted["loss"]))
        for stage in stages:
            for name, buffer in stage.submod.named_buffers():
                difference = (buffer.double() - wanted["buffers"][name].double()).abs().max()
                buffer_error = max(buffer_error, float(difference))
        optimizer.step()
    predicted = plan.peak_bytes[rank]
    return {
        "budget_bytes": plan.budget_bytes, "predicted_bytes": predicted, "measured_bytes": measured[-1],
        "error": predicted / measured[-1] - 1, "gradient_error": gradient_error, "loss_error": loss_error,
        "buffer_error": buffer_error, "recomputes": any(s.extra_s > 0 for s in plan.stages),
    }  # fmt: skip


def _peak_bytes(steps: Any, batch: tuple[Tensor, ...], optimizer: Any, losses: list[Tensor | None]) -> int:
    """Peak of one step; `optimizer` is named so that its state counts."""

    def step() -> None:
        assert optimizer is not None
        losses.append(steps.step(*batch))

    return fxmem.measure(step).peak_bytes
