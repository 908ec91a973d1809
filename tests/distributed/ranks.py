"""Real processes over gloo on this machine: `python -m tests.distributed.ranks SCENARIO ...` prints JSON lines.

The parent captures the model and computes the reference; the ranks are forked from it, so they run graphs only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.pipeline_matrix import matrix_rows, steps_of_one_process
from bench.pipeline_ranks import run_ranks
from fxmem.capture import capture
from fxmem.runtime.pipeline.batch import split_batch
from fxmem.runtime.pipeline.pipeline import Pipeline, build_pipeline
from tests import zoo

RATE = 0.05
TIMEOUT_S = 120


class Tagger(nn.Module):
    """Residual blocks over tokens, and many classes: in its last stage the loss is what takes memory."""

    def __init__(self, num_classes: int = 8192, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_classes, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def build(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model of the zoo, or the `Tagger`, and its arguments: the same at every call."""
    if name != "tagger":
        return zoo.build(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tagger(), (torch.randint(8192, (8, 64)), torch.randint(8192, (8, 64)))


def even_cuts(model: nn.Module, args: tuple[Any, ...], num_microbatches: int, num_stages: int) -> list[int]:
    """Equal numbers of forward ops."""
    part = split_batch(args, {}, num_microbatches)[0]
    (joint,) = capture(model, part.args, frontend="aot")
    ops = [i for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
    return [ops[len(ops) * k // num_stages] for k in range(1, num_stages)]


def batch_of(args: tuple[Tensor, ...], num_rows: int) -> tuple[Tensor, ...]:
    """`args` repeated along the batch dimension, every row another one."""
    size = args[0].shape[0]
    return tuple(torch.cat([a.roll(i, -1) for i in range(-(-num_rows // size))])[:num_rows] for a in args)


def reference(model: nn.Module, args: tuple[Any, ...], num_microbatches: int) -> list[dict[str, Any]]:
    """`steps_of_one_process`, by plain gradient descent as in `train`."""
    return steps_of_one_process(model, args, num_microbatches, torch.optim.SGD(model.parameters(), lr=RATE))


def steps_of(
    pipeline: Any, args: tuple[Any, ...], num_steps: int, rank: int, state: dict[str, Tensor] | None = None
) -> Iterator[dict[str, Any]]:
    """Loss (of the last stage), gradients and buffers of this rank in every step, random numbers seeded by the rank."""
    torch.manual_seed(rank)
    made = pipeline.stage(rank, state_dict=state and {n: t.clone() for n, t in state.items()})
    stages = made if isinstance(made, list) else [made]
    schedule = pipeline.schedule(made)
    held = {name: p for stage in stages for name, p in stage.submod.named_parameters(remove_duplicate=False)}
    for _ in range(num_steps):
        for parameter in held.values():
            parameter.grad = None
        loss = schedule.step(*args)
        gradients = {n: p.grad.clone() for n, p in held.items() if p.grad is not None}
        buffers = {n: b.clone() for stage in stages for n, b in stage.submod.named_buffers()}
        yield {
            "loss": None if loss is None else loss.item(),
            "gradients": gradients,
            "buffers": buffers,
            "made": stages,
        }
        for parameter in {id(p): p for p in held.values()}.values():
            if parameter.grad is not None:
                parameter.data -= RATE * parameter.grad


def train(
    pipeline: Any,
    args: tuple[Any, ...],
    expected: list[dict[str, Any]],
    rank: int,
    state: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Relative error of this rank's gradients and of the losses, largest error of its buffers."""
    worst = loss_error = wrong = 0.0
    for wanted, found in zip(expected, steps_of(pipeline, args, len(expected), rank, state), strict=True):
        mine = {n: g for n, g in found["gradients"].items() if n in wanted["gradients"]}
        difference = sum((g - wanted["gradients"][n]).square().sum() for n, g in mine.items())
        norm = sum(wanted["gradients"][n].square().sum() for n in mine)
        worst = max(worst, float(difference / norm) ** 0.5)
        if found["loss"] is not None:
            loss_error = max(loss_error, abs(found["loss"] - wanted["loss"]))
        errors = [float((b.double() - wanted["buffers"][n].double()).abs().max()) for n, b in found["buffers"].items()]
        wrong = max(wrong, *errors, 0.0)
    keys = sorted({key for stage in found["made"] for key in stage.submod.state_dict()})
    return {"gradients": worst, "loss": loss_error, "buffers": wrong, "keys": keys}


def case(name: str, schedule: Any, num_ranks: int, num_stages: int, num_microbatches: int, num_rows: int) -> None:
    """Train model `name` on ranks and print the worst errors."""
    model, args = build(name)
    batch = batch_of(args, num_rows)
    cuts = even_cuts(model, batch, num_microbatches, num_stages)
    pipeline = build_pipeline(model, batch, cuts, num_microbatches, schedule, num_ranks=num_ranks)
    other, _ = build(name)
    expected = reference(other, batch, num_microbatches)
    results = run_ranks(num_ranks, lambda rank: train(pipeline, batch, expected, rank), TIMEOUT_S)
    errors = [r["error"] for r in results if "error" in r]
    print(
        json.dumps(
            {
                "model": name,
                "schedule": schedule if isinstance(schedule, str) else "actions",
                "errors": errors,
                "gradients": max((r.get("gradients", 1.0) for r in results), default=1.0),
                "loss": max(r.get("loss", 1.0) for r in results),
                "buffers": max(r.get("buffers", 1.0) for r in results),
                "shared": len(pipeline.shared),
                "all_keys": sorted({k for r in results for k in r.get("keys", ())}) == sorted(other.state_dict()),
            }
        ),
        flush=True,
    )


def planned(name: str, schedule: str, num_ranks: int, num_microbatches: int, num_rows: int, budget: Any) -> None:
    """Every rank plans by `fxmem.pipeline` (rank 0 decides), trains and measures one step from no gradients on."""
    import fxmem

    def run(rank: int) -> dict[str, Any]:
        model, args = build(name)
        batch = batch_of(args, num_rows)
        pipe = fxmem.pipeline(
            model,
            batch,
            budget,
            num_stages=num_ranks,
            num_microbatches=num_microbatches,
            schedule=schedule,
            solve_s=0.1,
        )
        expected = reference(build(name)[0], batch, num_microbatches)
        result = train(pipe, batch, expected, rank, state=dict(model.state_dict()))
        made = pipe.stage(rank, state_dict=model.state_dict())
        steps = pipe.schedule(made)
        peaks = []
        for _ in range(3):
            for stage in made if isinstance(made, list) else [made]:
                stage.submod.zero_grad()
            peaks.append(fxmem.measure(lambda: steps.step(*batch)).peak_bytes)
        plan = pipe.plan
        return {
            **result, "peaks": peaks, "predicted": plan.peak_bytes[rank], "budget": plan.budget_bytes,
            "extra_s": sum(s.extra_s for s in plan.stages), "schedule": plan.schedule,
            "batch": sum(t.nbytes for t in batch), "split": [region for s in plan.stages for region in s.split],
        }  # fmt: skip

    print(json.dumps(run_ranks(num_ranks, run, TIMEOUT_S)), flush=True)


def in_flight(schedule: str, num_stages: int) -> None:
    """Prints, for 4 and 12 microbatches, by how much each rank's resident memory rose at most in a step (bytes).

    Seen from outside of torch, since a tensor that a pending message holds has no Python object.
    """
    found = []
    for count in (4, 12):
        model, args = build("mlp")
        batch = batch_of(args, NUM_MEMORY_ROWS * count)
        cuts = even_cuts(model, batch, count, num_stages)
        pipeline = build_pipeline(model, batch, cuts, count, schedule, num_ranks=2)

        def run(rank: int, pipeline: Pipeline = pipeline, batch: tuple[Tensor, ...] = batch) -> dict[str, Any]:
            made = pipeline.stage(rank)
            schedule = pipeline.schedule(made)
            schedule.step(*batch)
            seen = [_resident_bytes()]
            for stage in made if isinstance(made, list) else [made]:
                stage.forward_one_chunk = _sampled(stage.forward_one_chunk, seen)
                stage.backward_one_chunk = _sampled(stage.backward_one_chunk, seen)
            schedule.step(*batch)
            return {"rise_bytes": max(seen) - seen[0]}

        found.append([rank["rise_bytes"] for rank in run_ranks(2, run, TIMEOUT_S)])
    print(json.dumps(found), flush=True)


NUM_MEMORY_ROWS = 1 << 15
"""Rows of a microbatch in `in_flight`: 2 MiB for what crosses a cut, so that the allocator returns it at once."""


def _sampled(method: Any, seen: list[int]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        seen.append(_resident_bytes())
        result = method(*args, **kwargs)
        seen.append(_resident_bytes())
        return result

    return run


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    torch.set_num_threads(1)
    scenario, *rest = sys.argv[1:]
    if scenario == "cases":
        for text in rest:
            case(*json.loads(text))
    elif scenario == "planned":
        for text in rest:
            planned(*json.loads(text))
    elif scenario == "matrix":
        model, schedules = rest[0], {int(ranks): names for ranks, names in json.loads(rest[1]).items()}
        for row in matrix_rows([model], schedules):
            print(json.dumps(row), flush=True)
    else:
        in_flight(rest[0], int(rest[1]))


if __name__ == "__main__":
    main()
