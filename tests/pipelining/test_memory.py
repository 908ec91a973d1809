"""A rank's memory as it is foretold, part by part, against the allocator; no processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxmem
from fxmem.pipelining.model_plan import NO_LIMIT, ModelPlanner, Request
from fxmem.runtime.pipeline.batch import split_batch
from fxmem.runtime.pipeline.code import StageCode
from fxmem.runtime.pipeline.memory import StageBytes
from fxmem.runtime.pipeline.pipeline import Pipeline
from fxmem.step.measurement import MemoryTrace


class Skips(nn.Module):
    """Convolutions; the output of each is read again by the last one, all of them side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(n, 4, 3, padding=1) for n in (3, 4, 4, 12))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
            seen.append(x)
        return self.layers[-1](torch.cat(seen, 1)).square().mean()


class Table(nn.Module):
    """A table that no state dict holds (or that one does), read before the layers."""

    table: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1000), persistent=persistent)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.table[:8]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def stages(schedule: str) -> list[StageBytes]:
    model, batch = Skips(), (torch.randn(8, 3, 12, 12),)
    pipeline = Pipeline(model, split_batch(batch, {}, 4))
    request = Request(2, (4,), None, schedule, "auto", "auto", None, 0.1)
    planner = ModelPlanner(pipeline, request, 4, batch, model, None)
    made = planner.realise(planner.propose(schedule, NO_LIMIT), NO_LIMIT, float("inf"))
    assert made is not None
    return [
        planner.realiser.bytes_of(graph, made[0].positions, actions)
        for graph, actions in zip(pipeline.stage_graphs, made[0].stages, strict=True)
    ]


def measured(code: StageCode, kind: str) -> int:
    """Peak of one run over what it was given, which all outlives it."""
    run = {"F": code.forward, "B": code.backward, "I": code.input_backward, "W": code.weight_backward}[kind]
    given = [_value(node) for node in code.module(kind).graph.find_nodes(op="placeholder")]
    run(list(given))
    with MemoryTrace("cpu") as trace:
        run(list(given))
    assert trace.peak_delta_bytes is not None
    return trace.peak_delta_bytes


def _value(node: fx.Node) -> Any:
    like = node.meta["val"]
    if like is None:
        return lambda *_: None  # the sink of gradients
    return torch.ones(()).expand(like.shape).clone().as_strided(like.shape, like.stride()) if like.numel() else like


def test_parts_of_a_split_convolution_take_what_they_take_alone() -> None:
    for at in stages("zbv"):
        for kind in ("F", "I", "W"):
            assert at.peak(kind, (), {}) == measured(at.code, kind), (at.graph.index, kind)


def test_buffers_that_no_state_dict_holds_stay_on_every_rank() -> None:
    """The pipeline keeps them, for stages made again."""
    args, options = (torch.randn(8, 8),), {"num_stages": 2, "num_microbatches": 2, "schedule": "gpipe"}
    kept, only_where_read = (fxmem.pipeline(Table(p), args, **options).plan.peak_bytes for p in (False, True))
    assert [a - b for a, b in zip(kept, only_where_read, strict=True)] == [0, 4000]


def test_a_message_that_must_be_packed_takes_its_own_bytes_not_its_storages() -> None:
    """Gradients of what `cat` took are slices of one storage."""
    packed = 0
    for at in stages("1f1b"):
        results = list(at.code.module("B").graph.output_node().args[0])  # type: ignore[arg-type]
        sent = [node.meta["val"] for node in results[: len(at.graph.grad_sends)]]  # type: ignore[union-attr]
        for value, (key, copied_bytes) in zip(sent, at.outputs("B"), strict=True):
            if copied_bytes:
                assert copied_bytes == value.nbytes < at.sizes[key]
                packed += 1
    assert packed
