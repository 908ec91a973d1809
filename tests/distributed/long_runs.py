"""Planned pipelines in real processes, over many microbatches, many steps, and past a rank's death.

`python -m tests.distributed.long_runs SCENARIO ...` prints JSON.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from bench.pipeline_matrix import grown
from bench.pipeline_ranks import run_ranks
from fxmem.errors import BudgetInfeasible
from fxmem.ir.program import Program
from fxmem.passes.stage_split import StageGraph
from fxmem.pipelining.schedules import Schedule, one_f_one_b, torch_schedule
from fxmem.runtime.pipeline.batch import split_batch
from fxmem.runtime.pipeline.pipeline import Pipeline, build_pipeline
from fxmem.runtime.pipeline.stage import Stage
from fxmem.runtime.transfers import ops
from fxmem.schedule import Action
from tests.distributed.ranks import TIMEOUT_S, even_cuts, reference, steps_of, train
from tests.runtime.transfers.plans import full_plan, offload_plan, saved_storages
from tests.zoo import build

NUM_STEPS = 50
ROWS = 16  # of a microbatch
DEATH_S = 10  # how long the others wait for a message


def stages_of(made: Stage | list[Stage]) -> list[Stage]:
    return made if isinstance(made, list) else [made]


def peak_bytes(made: Any, steps: Any, batch: tuple[Tensor, ...]) -> int:
    """Of a step that begins without gradients."""
    for stage in stages_of(made):
        stage.submod.zero_grad()
    return fxmem.measure(lambda: steps.step(*batch)).peak_bytes


def microbatches(name: str, counts: Sequence[int]) -> None:
    """For each number of microbatches, every rank's peak without the batch and the losses; cuts and order are fixed."""
    schedules: dict[str, Callable[[int], Schedule]] = {
        "1f1b": lambda count: one_f_one_b(2, count),
        "zbv": lambda count: torch_schedule("zbv", 2, count, 2),
        "interleaved-zb": lambda count: torch_schedule("interleaved-zb", 2, count, 2),
    }
    model, args = build("mlp")
    prepared = []
    for count in counts:
        batch = grown(args, ROWS * count)
        schedule = schedules[name](count)
        pipeline = Pipeline(model, split_batch(batch, {}, count))
        cuts = even_cuts(model, batch, count, schedule.num_stages)
        pipeline.cut(cuts, "actions", schedule.as_csv_rows(), schedule.device_of)
        prepared.append((pipeline, batch, count))
    state = dict(model.state_dict())

    def run(rank: int) -> dict[str, Any]:
        found = []
        for pipeline, batch, count in prepared:
            made = pipeline.stage(rank, state_dict=state)
            steps = pipeline.schedule(made)
            steps.step(*batch)
            inputs = sum(t.nbytes for t in batch) + (4 * count if any(s.is_last for s in stages_of(made)) else 0)
            found.append(peak_bytes(made, steps, batch) - inputs)
        return {"peaks": found}

    print(json.dumps([rank.get("peaks", rank) for rank in run_ranks(2, run, TIMEOUT_S)]), flush=True)


def census(modules: list[nn.Module]) -> list[int]:
    """What must not grow: live tensors and their bytes, hooks, and what transfer engines hold."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    parameters = [p for module in modules for p in module.parameters()]
    hooks = sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in parameters)
    hooks += sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for module in modules for m in module.modules())
    levels = [engine.levels() for engine, _ in ops._ENGINES.values()]
    held = [n for at in levels for n in (at.host_bytes, at.disk_bytes, at.num_steps, at.num_arenas, at.num_allocations)]
    return [len(tensors), sum(storages.values()), hooks, *held]


def steps(schedule: str, count: int) -> None:
    """Train against one process, then take many steps. Prints what every rank found."""
    model, args = build("gpt2")
    batch = grown(args, 2 * count)
    expected = reference(build("gpt2")[0], batch, count)
    pipe = fxmem.pipeline(model, batch, num_stages=2, num_microbatches=count, schedule=schedule, solve_s=0.1)
    state = dict(model.state_dict())
    print(json.dumps(run_ranks(2, lambda rank: _many_steps(pipe, batch, expected, rank, state), TIMEOUT_S)), flush=True)


def tier(schedule: str, count: int) -> None:
    """The same under a budget too small for recomputation alone, dropout in the model, against the same stages with
    everything saved. Prints the smallest budget without a tier too.
    """
    model, args = build("gpt2_dropout")
    batch = grown(args, 2 * count)
    options: dict[str, Any] = {"num_stages": 2, "num_microbatches": count, "schedule": schedule, "solve_s": 0.1}
    try:
        fxmem.pipeline(model, batch, 1, **options)
    except BudgetInfeasible as error:
        smallest = error.min_bytes
    budget = int(0.85 * smallest)
    state = dict(model.state_dict())

    with tempfile.TemporaryDirectory() as folder:
        pipe = fxmem.pipeline(model, batch, budget, **options, tiers="disk", offload_dir=folder)
        unplanned = copy.copy(pipe.runtime)
        unplanned.plan_stage, unplanned._codes = None, {}

        def run(rank: int) -> dict[str, Any]:
            expected = list(steps_of(unplanned, batch, 3, rank, state))
            return _many_steps(pipe, batch, expected, rank, state)

        print(json.dumps({"smallest": smallest, "budget": budget, "ranks": run_ranks(2, run, TIMEOUT_S)}), flush=True)


def _many_steps(
    pipe: fxmem.PlannedPipeline, batch: tuple[Tensor, ...], expected: list[dict[str, Any]], rank: int,
    state: dict[str, Tensor],
) -> dict[str, Any]:  # fmt: skip
    result = train(pipe, batch, expected, rank, state)
    made = pipe.stage(rank, state_dict=state)
    runs = pipe.schedule(made)
    modules: list[nn.Module] = [stage.submod for stage in stages_of(made)]
    peaks, seen = [], []
    for step in range(NUM_STEPS):
        peaks.append(peak_bytes(made, runs, batch))
        if step in (5, NUM_STEPS - 1):
            seen.append(census(modules))
    moved = [stage.moved_bytes for stage in pipe.plan.stages if stage.rank == rank]
    return result | {"peaks": peaks, "census": seen, "predicted": pipe.plan.peak_bytes[rank], "moved": sum(moved)}


def moved(name: str, schedule: str, num_stages: int) -> None:
    """Everything that may be is moved to disk and back, at random places; errors, and what the engines hold at last."""
    model, args = build(name)
    batch = grown(args, 8)
    expected = reference(build(name)[0], batch, 4)

    def plan(graph: StageGraph, program: Program) -> tuple[Action, ...]:
        everything = full_plan(program)
        storages = saved_storages(program, everything, graph.joint)
        return offload_plan(program, everything, storages, ("disk",), seed=graph.index)

    cuts = even_cuts(model, batch, 4, num_stages)
    pipeline = build_pipeline(model, batch, cuts, 4, schedule, num_ranks=2, plan_stage=plan)
    with tempfile.TemporaryDirectory() as folder:
        pipeline.offload_dir = folder

        def run(rank: int) -> dict[str, Any]:
            result = train(pipeline, batch, expected, rank)
            levels = [engine.levels() for engine, _ in ops._ENGINES.values()]
            return result | {
                "engines": len(levels), "disk": min(at.disk_bytes for at in levels),
                "pending": sum(at.num_steps + at.pending_device_bytes for at in levels),
            }  # fmt: skip

        print(json.dumps(run_ranks(2, run, TIMEOUT_S)), flush=True)


def death() -> None:
    """Rank 2 of 4 dies while it runs a microbatch of its second step; what the others raise, and when."""
    model, args = build("mlp")
    batch = grown(args, 16)
    pipe = fxmem.pipeline(model, batch, num_stages=4, num_microbatches=4, schedule="1f1b")

    def run(rank: int) -> dict[str, Any]:
        made = pipe.stage(rank)
        runs = pipe.schedule(made)
        runs.step(*batch)
        assert isinstance(made, Stage)
        forward = made.forward_one_chunk

        def dies(chunk: int, *rest: Any, **named: Any) -> Any:
            if chunk == 2:
                os._exit(1)
            return forward(chunk, *rest, **named)

        if rank == 2:
            made.forward_one_chunk = dies  # type: ignore[method-assign]
        started = time.monotonic()
        try:
            runs.step(*batch)
        except Exception as error:
            kept = [stage.num_saved for stage in stages_of(made)]
            return {"raised": f"{type(error).__name__}: {error}", "after_s": time.monotonic() - started, "kept": kept}
        return {}

    print(json.dumps(run_ranks(4, run, 2 * DEATH_S)), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    scenario, *rest = sys.argv[1:]
    if scenario == "microbatches":
        microbatches(rest[0], [int(n) for n in rest[1:]])
    elif scenario == "moved":
        moved(rest[0], rest[1], int(rest[2]))
    elif scenario == "steps":
        steps(rest[0], int(rest[1]))
    elif scenario == "tier":
        tier(rest[0], int(rest[1]))
    else:
        death()


if __name__ == "__main__":
    main()
