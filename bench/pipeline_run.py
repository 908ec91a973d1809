"""Planned pipelines in real processes over gloo: predicted against measured peak per rank, and partitioners compared.

`python -m bench.pipeline_run --json` prints a JSON list, one row a (model, ranks, planner, budget): predicted and
measured peak of every rank, the largest relative error, whether the measurement is under the budget, seconds of a step
(median of `NUM_STEPS`, the slowest rank) and their ratio to `auto`'s. Ranks share this machine's cores, so more ranks
than cores say nothing of speed: their seconds are of all ranks in turn. Everything runs on loopback.

`python -m bench.pipeline_run --matrix --json`: one row a (model, schedule, ranks, rank), see `bench.pipeline_matrix`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import fxmem
from bench.common import Row, show
from bench.pipeline_matrix import MODELS, RANKS, SCHEDULES, matrix_rows
from bench.pipeline_ranks import run_ranks
from fxmem.budget import Budget
from fxmem.testing.zoo import build

NUM_STEPS = 5
TIMEOUT_S = 240
CASES = (("gpt2", "tiny", 2), ("mlp", "small", 2), ("gpt2", "small", 2), ("gpt2", "tiny", 4), ("mlp", "small", 4))
"""(model, size, ranks)."""
PLANNERS = ("auto", "time", "layers", "parameters", "mcap")
BUDGETS: tuple[Budget, ...] = (None, 0.8)


def rows(quick: bool) -> Iterator[Row]:
    """Every planner in every case."""
    for model, size, num_ranks in CASES[:1] if quick else CASES:
        for budget in BUDGETS:
            base_s: float | None = None
            for planner in PLANNERS[:2] if quick else PLANNERS:
                row = _row(run_ranks(num_ranks, partial(_measured, model, size, num_ranks, planner, budget), TIMEOUT_S))
                base_s = row.get("step_s") if planner == "auto" else base_s
                ratio = row["step_s"] / base_s if base_s and "step_s" in row else None
                head: Row = {"model": f"{model} {size}", "ranks": num_ranks, "planner": planner, "budget": budget}
                yield {**head, **row, "ratio_to_auto": ratio}


def _row(found: list[dict[str, Any]]) -> Row:
    errors = [rank["error"] for rank in found if "error" in rank]
    if errors:
        return {"error": errors[0].splitlines()[0]}
    worst = max(abs(rank["predicted_bytes"] / rank["measured_bytes"] - 1) for rank in found)
    budget = found[0]["budget_bytes"]
    return {
        "schedule": found[0]["schedule"],
        "budget_bytes": budget,
        "predicted_bytes": [rank["predicted_bytes"] for rank in found],
        "measured_bytes": [rank["measured_bytes"] for rank in found],
        "largest_error": worst,
        "under_budget": budget is None or all(rank["measured_bytes"] <= budget for rank in found),
        "simulated_step_s": found[0]["simulated_s"],
        "step_s": max(rank["step_s"] for rank in found),
    }


def _measured(model: str, size: str, num_ranks: int, planner: str, budget: Budget, rank: int) -> Row:
    """On one rank: plan, warm up, measure one step's memory, time the others."""
    torch.set_num_threads(1)
    module, args = build(model, size)  # type: ignore[arg-type]
    batch = tuple(torch.cat([a] * (8 // a.shape[0] or 1)) for a in args)
    schedule = "auto" if planner == "auto" else "1f1b-n"
    pipe = fxmem.pipeline(
        module, batch, budget, num_stages=num_ranks, num_microbatches=4, planner=planner, schedule=schedule
    )
    made: Any = pipe.stage(rank)
    steps = pipe.schedule(made)

    def step() -> float:
        made.submod.zero_grad()
        dist.barrier()
        started = time.perf_counter()
        steps.step(*batch)
        return time.perf_counter() - started

    step()
    made.submod.zero_grad()
    measured = fxmem.measure(lambda: steps.step(*batch)).peak_bytes
    seconds = statistics.median(step() for _ in range(NUM_STEPS))
    plan = pipe.plan
    return {
        "schedule": plan.schedule, "budget_bytes": plan.budget_bytes, "simulated_s": plan.step_s, "step_s": seconds,
        "predicted_bytes": plan.peak_bytes[rank], "measured_bytes": measured,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list (default: a table)")
    parser.add_argument("--quick", action="store_true", help="one case, two planners")
    parser.add_argument("--matrix", action="store_true", help="models x schedules x ranks: gradients and peaks")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="of the matrix")
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS, help="of the matrix")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="of the matrix")
    args = parser.parse_args()
    if args.matrix:
        cells = dict.fromkeys(args.ranks, args.schedules)
        show(matrix_rows(args.models, cells), args.json, "exactness and memory over gloo")
    else:
        show(rows(args.quick), args.json, "planned pipelines over gloo")


if __name__ == "__main__":
    main()
