"""`fxmem.pipeline`: cut a model, choose the schedule and what each stage recomputes, and hand out stages that run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxmem import compat
from fxmem.budget import Budget, resolve_budget
from fxmem.errors import OptionError
from fxmem.options import settings
from fxmem.pipelining.decision import Driver, PipelineResult
from fxmem.pipelining.model_plan import Request
from fxmem.pipelining.registry import PLANNERS
from fxmem.runtime.pipeline.batch import LossWeight, split_batch
from fxmem.runtime.pipeline.params import Init, verify_plain
from fxmem.runtime.pipeline.pipeline import Pipeline
from fxmem.runtime.pipeline.stage import Stage
from fxmem.step.forms import may_split

SCHEDULES = (
    "auto", "gpipe", "1f1b", "1f1b-n", "zero-bubble", "interleaved", "interleaved-zb", "looped-bfs", "zbv", "dualpipev",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedPipeline:
    """A model cut into stages under a budget. `plan`: what was decided and what it costs; `stage` and `schedule` give
    torch.distributed.pipelining objects.
    """

    plan: PipelineResult
    runtime: Pipeline

    def stage(
        self,
        rank: int,
        device: torch.device | str = "cpu",
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        init: Init | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Stage | list[Stage]:
        """The stage (or list of stages) of `rank`, its parameters on `device`; see `Pipeline.stage`."""
        return self.runtime.stage(rank, device, state_dict=state_dict, init=init, group=group)

    def schedule(self, stage: Stage | Sequence[Stage]) -> Any:
        """The schedule of this rank's stages: `schedule.step(*inputs, target=y)` is one step on a whole batch."""
        return self.runtime.schedule(stage)

    def report(self, path: str | Path) -> None:
        """Write an HTML report: every rank's schedule and memory."""
        self.plan.report(path)

    def __str__(self) -> str:
        return str(self.plan)


def pipeline(
    model: nn.Module,
    args: Sequence[Any],
    budget: Budget = None,
    *,
    num_stages: int,
    num_microbatches: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    schedule: str = "auto",
    planner: str = "auto",
    stage_planner: str = "auto",
    loss_fn: Callable[..., Any] | None = None,
    loss_weight: LossWeight = "mean",
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    device_spec: str | Path | None = None,
    solve_s: float | None = None,
    tiers: str | Sequence[str] | None = None,
    offload_dir: str | Path | None = None,
    fission: Literal["auto", "off"] = "auto",
) -> PlannedPipeline:
    """Cut `model` over `num_stages` devices so that a step's allocated bytes stay under `budget` on each of them.

    `model(*args, **kwargs)` returns a scalar loss first; or `loss_fn(model(*args[:-1], **kwargs), args[-1])` does.
    `args`: one whole batch (real, fake or meta), batch dimension first; it is split into `num_microbatches`. `budget`:
    bytes a device ("6GiB", an int), a fraction of the largest rank's peak with nothing recomputed under 1F1B, "min", or
    None. `num_microbatches`: chosen where it is left out. `schedule`: "auto" (the fastest of 1F1B-n, zero-bubble,
    interleaved with whole or split backwards, ZBV and DualPipeV), "1f1b-n", "zero-bubble" or one of torch's by name;
    interleaved and V-shaped ones give every device two stages. `planner`: how to cut
    (`fxmem.pipelining.registry`); `stage_planner`: how each stage recomputes, `solve_s` seconds at most per try.
    `optimizer`: its state counts. `device`: what the stages run on (default: where the model is). `device_spec`: plan
    for that device, not this one. `tiers`: where stages may offload saved tensors to ("host", "disk", several of them,
    or "auto"), on disk in `offload_dir`; cuts and schedule are chosen as if stages could only recompute. `fission`: may
    stages run regions around their largest values in parts, where that is faster or needs less ("auto"; or "off")?

    In a process group rank 0 decides and the others follow, so that every rank may call this with its own copy of the
    model; ranks that ask for different things are refused. Modes of modules and `torch.autocast` are those in force
    now. Raises OptionError; CaptureError; CutError, saying why the model can't be cut; BudgetInfeasible, naming the
    stage, its bytes and the smallest budget found.
    """
    _check(num_stages, num_microbatches, schedule, planner, fission, args)
    checked = settings(
        budget, planner=stage_planner, tiers=tiers, offload_dir=offload_dir, optimizer=optimizer, loss_fn=loss_fn,
        device_spec=device_spec, solve_s=solve_s, fission=fission,
    )  # fmt: skip
    verify_plain(model)
    limit = resolve_budget(budget)
    batch = [t for t in compat.tree_leaves((tuple(args), dict(kwargs or {}))) if isinstance(t, Tensor)]
    counts = (num_microbatches,) if num_microbatches else microbatch_counts(batch, num_stages)

    def make(count: int) -> Pipeline:
        parts = split_batch(args, kwargs or {}, count)
        return Pipeline(model, parts, loss_fn, loss_weight, device or _device_of(model))

    request = Request(
        num_stages, counts, limit, schedule, planner, stage_planner, device_spec, solve_s,
        checked.tiers, offload_dir, may_split(checked),
    )  # fmt: skip
    driver = Driver(make, request, batch, model, optimizer)
    return PlannedPipeline(driver.run(), driver.runtime)


def microbatch_counts(batch: Sequence[Tensor], num_stages: int) -> tuple[int, ...]:
    """The numbers of equal microbatches to choose from: divisors of the batch's rows, 4, 2, 8 and 1 a stage or the next
    smaller ones. Raises OptionError where nothing has a batch dimension.
    """
    rows = next((t.shape[0] for t in batch if t.dim()), 0)
    if not rows:
        raise OptionError("the arguments hold no tensor with a batch dimension")
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    return tuple(dict.fromkeys(max(n for n in divisors if n <= times * num_stages) for times in (4, 2, 8, 1)))


def _check(
    num_stages: int, num_microbatches: int | None, schedule: str, planner: str, fission: object, args: object
) -> None:
    """Raises OptionError naming the choices."""
    if not isinstance(args, (tuple, list)):
        raise OptionError(f"args must be a tuple of the model's arguments, not {type(args).__name__}")
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value is None and name == "num_microbatches":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{name} must be a positive number, not {value!r}")
    if schedule not in SCHEDULES:
        raise OptionError(f"unknown schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    if planner not in PLANNERS:
        raise OptionError(f"unknown pipeline planner {planner!r}: choose one of {', '.join(PLANNERS)}")
    if fission not in ("auto", "off"):
        raise OptionError(f"fission must be 'auto' or 'off', not {fission!r}")


def _device_of(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
