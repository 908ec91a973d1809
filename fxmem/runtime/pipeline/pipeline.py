"""`Pipeline`: a model cut into stages, ready to run on torch.distributed.pipelining.

Every rank builds the same Pipeline (capture is deterministic and runs nothing) and then materialises its own stages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxmem.capture import JointGraph, capture
from fxmem.errors import CaptureError, OptionError
from fxmem.passes.offload import open_transfers
from fxmem.passes.stage_carry import split_held
from fxmem.passes.stage_split import CutError, Cuts, StageGraph, split_stages
from fxmem.runtime.pipeline.batch import LossWeight, Microbatch, Signature, split_batch
from fxmem.runtime.pipeline.code import PlanStage, StageCode, stage_program
from fxmem.runtime.pipeline.cuts import Anchors
from fxmem.runtime.pipeline.params import Init, Names, Parameters, skeleton_of, tensors_of
from fxmem.runtime.pipeline.schedule import SEVERAL, SINGLE, V_SHAPED, make_schedule
from fxmem.runtime.pipeline.stage import Mode, Stage
from fxmem.runtime.pipeline.traced import Attributes, Autocast, Traced


@dataclass(frozen=True)
class StagePlan:
    """`num_ops`: of forward and backward. `send_bytes`, `grad_send_bytes`: one microbatch's messages."""

    index: int
    rank: int
    num_ops: int
    parameters: tuple[str, ...]
    static_bytes: int
    send_bytes: int
    grad_send_bytes: int


@dataclass(frozen=True)
class PipelinePlan:
    """Where the model is cut, who runs what, and in which order."""

    stages: tuple[StagePlan, ...]
    schedule: str
    num_microbatches: int
    shared: Mapping[str, tuple[int, ...]]


class Pipeline:
    """See `build_pipeline`. `stage(rank, device)` and `schedule(stage)` give torch.distributed.pipelining objects.

    `joint`: the graph of the first microbatch, captured on `device`. `cut` comes before everything else.
    `plan_stage`: see `PlanStage`. `split_stage`: gives a stage that trains with regions in parts, before it is planned.
    `offload_dir`: folder of what stages offload to disk (default: the system's).
    """

    stage_graphs: tuple[StageGraph, ...]
    rank_of: tuple[int, ...]
    rows: Sequence[Sequence[Any]]

    def __init__(
        self,
        model: nn.Module,
        parts: Sequence[Microbatch],
        loss_fn: Callable[..., Any] | None = None,
        loss_weight: LossWeight = "mean",
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_microbatches, self.loss_weight = len(parts), loss_weight
        self.schedule_name = ""
        self.plan_stage: PlanStage | None = None
        self.split_stage: Callable[[StageGraph], StageGraph] = lambda graph: graph
        self.offload_dir: str | Path | None = None
        self._values = tensors_of(model)  # until stages are made, then only what no state dict holds
        self._skeleton = skeleton_of(model)
        self._names = Names(self._skeleton)
        self._loss_fn, self._first = loss_fn, parts[0]
        self._device = torch.device(device)
        self._graphs: dict[tuple[Signature, Mode], tuple[StageGraph, ...]] = {}
        self._codes: dict[tuple[Signature, Mode, int], StageCode] = {}
        self._mode = Mode(True, self._skeleton.training, Autocast.of(self._device))
        self.joint = self._capture(parts[0], self._mode)

    def cut(
        self, cuts: Cuts, schedule_name: str, rows: Sequence[Sequence[Any]] = (), rank_of: Sequence[int] = ()
    ) -> None:
        """Cut the graph, and say who runs which stage and (if the schedule is a list of actions) in which order.

        Raises OptionError, CutError.
        """
        self.stage_graphs = split_stages(self.joint, cuts)
        self._graphs = {(self._first.signature, self._mode): self.stage_graphs}
        self._codes.clear()
        self._anchors = Anchors(self.joint, cuts)
        self.schedule_name = schedule_name
        self.rank_of = tuple(rank_of or range(self.num_stages))
        self.rows = rows or _one_f_one_b(self.num_stages, self.num_microbatches, schedule_name)

    @property
    def num_stages(self) -> int:
        return len(self.stage_graphs)

    @property
    def num_ranks(self) -> int:
        return max(self.rank_of) + 1

    @property
    def joint_device(self) -> torch.device:
        """What `joint` was captured for."""
        return self._device

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters and buffers on the meta device, by canonical name."""
        return self._names.tensors

    @property
    def trained(self) -> set[str]:
        """Parameters that get a gradient."""
        return {self.canonical(g, i) for g in self.stage_graphs for i in g.gradients}

    def held(self, rank: int) -> list[str]:
        """Parameters and buffers of the stages of `rank`, each once."""
        mine = [g for g in self.stage_graphs if self.rank_of[g.index] == rank]
        return list(dict.fromkeys(self.canonical(g, n) for g in mine for n in g.statics))

    @property
    def kept(self) -> set[str]:
        """Buffers that no state dict holds: the pipeline keeps those of the model, for stages made again."""
        values = {n: self._values[n] for n in self._names.transient if n in self._values}
        return {self._names.canonical[n] for n, t in values.items() if t.device.type == self._device.type}

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Trained parameters that several ranks hold, and those ranks: their gradients are summed once a step."""
        holders: dict[str, set[int]] = {}
        trained = self.trained
        for graph in self.stage_graphs:
            for name in graph.statics:
                holders.setdefault(self.canonical(graph, name), set()).add(self.rank_of[graph.index])
        return {n: tuple(sorted(ranks)) for n, ranks in holders.items() if n in trained and len(ranks) > 1}

    @property
    def plan(self) -> PipelinePlan:
        stages = tuple(
            StagePlan(
                index=graph.index,
                rank=self.rank_of[graph.index],
                num_ops=sum(node.op == "call_function" for node in graph.joint.nodes),
                parameters=tuple(dict.fromkeys(self.canonical(graph, n) for n in graph.statics)),
                static_bytes=sum(
                    self._names.tensors[n].nbytes for n in {self.canonical(graph, name) for name in graph.statics}
                ),
                send_bytes=sum(v.nbytes for v in graph.values(graph.sends)),
                grad_send_bytes=sum(v.nbytes for v in graph.values(graph.grad_sends)),
            )
            for graph in self.stage_graphs
        )
        return PipelinePlan(stages, self.schedule_name, self.num_microbatches, self.shared)

    def stage(
        self,
        rank: int,
        device: torch.device | str = "cpu",
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        init: Init | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Stage | list[Stage]:
        """The stages of `rank` with their parameters and buffers on `device`, and no others.

        Values come from `state_dict`, or else from the model the pipeline was built from, or else from `init`. The
        pipeline lets go of the model, but for non-persistent buffers, which no state dict holds. One stage, or a list
        where the schedule gives a rank several. Raises OptionError for a rank without stages or a value that nothing
        gives.
        """
        mine = [graph for graph in self.stage_graphs if self.rank_of[graph.index] == rank]
        if not mine:
            raise OptionError(f"rank {rank} has no stage; the ranks are 0..{self.num_ranks - 1}")
        self._move(torch.device(device))
        parameters = Parameters(self._names, self._device, self.shared)
        wanted = {g.index: list(dict.fromkeys(self.canonical(g, n) for n in g.statics)) for g in mine}
        values = self._values | dict(state_dict or {})
        parameters.load([n for names in wanted.values() for n in names], values, init)
        self._values = {n: t for n, t in self._values.items() if n in self._names.transient}
        stages = [
            Stage(g.index, self.num_stages, module, parameters, self.canonical, self.code, group)
            for g, module in zip(mine, [parameters.module(wanted[g.index]) for g in mine], strict=True)
        ]
        for stage in stages:
            stage.submod.train(self._skeleton.training)
            stage.stage_index_to_group_rank = dict(enumerate(self.rank_of))
        return stages[0] if len(stages) == 1 else stages

    def schedule(self, stage: Stage | Sequence[Stage]) -> Any:
        """A torch.distributed.pipelining schedule over the stages of this rank; see `PlannedSteps.step`."""
        return make_schedule(self, [stage] if isinstance(stage, Stage) else list(stage))

    def code(self, index: int, part: Microbatch, mode: Mode) -> StageCode:
        """What stage `index` runs for microbatches shaped like `part`; captured when such a shape is first seen.

        Raises OptionError for a training step under another autocast than the one it was planned under.
        """
        key = (part.signature, mode, index)
        if key not in self._codes:
            if mode.has_backward and mode.autocast != self._mode.autocast:
                raise OptionError(
                    f"the step runs under {mode.autocast}, the pipeline was planned under {self._mode.autocast}: call "
                    "fxmem.pipeline (or build_pipeline) within the torch.autocast that is around the step"
                )
            if key[:2] not in self._graphs:
                joint = self._capture(part, mode)
                self._graphs[key[:2]] = self._split(joint)
            graph = self._graphs[key[:2]][index]
            graph = self.split_stage(graph) if mode.has_backward else graph
            program = stage_program(graph)
            actions = self.plan_stage(graph, program) if self.plan_stage and mode.has_backward else None
            transfers = open_transfers(program, actions or (), self.offload_dir)
            self._codes[key] = StageCode(graph, actions, transfers.key)
            weakref.finalize(self._codes[key], transfers.close)
        return self._codes[key]

    def _move(self, device: torch.device) -> None:
        """Graphs name devices: those captured for another type of device are captured again."""
        if device != self._device:
            is_same_type = device.type == self._device.type
            self._device = device
            self._codes.clear()
            if not is_same_type:
                self._mode = self._mode._replace(autocast=self._mode.autocast._replace(device=device.type))
                self.joint = self._capture(self._first, self._mode)
                self.stage_graphs = self._split(self.joint)
                self._graphs = {(self._first.signature, self._mode): self.stage_graphs}

    def _split(self, joint: JointGraph) -> tuple[StageGraph, ...]:
        """The stages of another graph of the model, which hold what those that were planned hold."""
        held = [set(self.held(rank)) for rank in self.rank_of]
        holders = {
            name: frozenset(stage for stage, names in enumerate(held) if canonical in names)
            for name, canonical in self._names.canonical.items()
        }
        return split_held(joint, self._anchors.stages_in(joint), self.num_stages, holders)

    def _capture(self, part: Microbatch, mode: Mode) -> JointGraph:
        """The graph of `part`. Raises CaptureError; CutError for a model whose graph depends on what it counts."""
        attributes = Attributes(self._skeleton)
        try:
            joint = self._trace(part, mode)
            if changed := attributes.changed():
                attributes.restore(keep_plain=True)
                if self._trace(part, mode).fingerprint != joint.fingerprint:
                    raise CutError(
                        f"forward changes {', '.join(changed)} and computes with it: stages run one captured graph, in "
                        "which it would stay as it was; make it a buffer, or an argument of the model"
                    )
        finally:
            attributes.restore()
        return joint

    def _trace(self, part: Microbatch, mode: Mode) -> JointGraph:
        if mode.is_training != self._skeleton.training:
            self._skeleton.train(mode.is_training)
        module = Traced(self._skeleton, self._loss_fn, part)
        args = tuple(torch.empty_like(t, device="meta") for t in part.tensors)
        with mode.autocast.set():
            try:
                (joint,) = capture(module, args, train=mode.has_backward, device=self._device, frontend="aot")
            except CaptureError as error:
                if "fake buffer" not in str(error):
                    raise
                raise CaptureError(
                    "forward reads a tensor that is no parameter, buffer, attribute of a module or argument (in a list "
                    "or dictionary, a global, a closure?): make it a buffer", error.source,
                ) from error  # fmt: skip
        if mode.has_backward:
            _require_one_loss(joint)
        return replace(joint, names={node: name.removeprefix("model.") for node, name in joint.names.items()})

    def canonical(self, graph: StageGraph, placeholder: str) -> str:
        """The parameter or buffer behind an input of a stage, by its first name in the model."""
        return self._names.canonical[graph.joint.names[placeholder]]


def _require_one_loss(joint: JointGraph) -> None:
    tangents = [n for n in joint.nodes[joint.num_forward_nodes :] if n.op == "placeholder"]
    first = joint.outputs[0] if joint.outputs else None
    if len(tangents) != 1 or tangents[0].meta["val"].dim() or getattr(first, "meta", {}).get("val") is None:
        raise CutError(
            "the first output must be the loss, a scalar, and nothing else may need gradients; or give loss_fn"
        )


def _one_f_one_b(num_stages: int, num_microbatches: int, name: str) -> list[list[str]]:
    """GPipe or 1F1B as action names, for what torch's own classes refuse (fewer microbatches than stages)."""
    rows = []
    for stage in range(num_stages):
        warm = num_microbatches if name == "gpipe" else min(num_microbatches, num_stages - stage)
        row = [f"{stage}F{i}" for i in range(warm)]
        for i in range(num_microbatches - warm):
            row += [f"{stage}B{i}", f"{stage}F{warm + i}"]
        rows.append(row + [f"{stage}B{i}" for i in range(num_microbatches - warm, num_microbatches)])
    return rows


def _rank_of(name: str, num_stages: int, num_ranks: int, rows: Sequence[Sequence[Any]]) -> tuple[int, ...]:
    """Rank of every stage. Raises OptionError where the schedule can't have that many."""
    if name == "actions":
        found = {int(str(a).split("F")[0]): rank for rank, row in enumerate(rows) for a in row if "F" in str(a)}
        if sorted(found) != list(range(num_stages)):
            raise OptionError(f"the actions run stages {sorted(found)}, the cuts make {num_stages}")
        return tuple(found[stage] for stage in range(num_stages))
    per_rank, rest = divmod(num_stages, num_ranks)
    if rest or (name in SINGLE and per_rank != 1) or (name in V_SHAPED and per_rank != 2):
        raise OptionError(f"schedule {name!r} can't run {num_stages} stages on {num_ranks} ranks")
    if name in V_SHAPED:
        return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))
    return tuple(stage % num_ranks for stage in range(num_stages))


def build_pipeline(
    model: nn.Module,
    args: Sequence[Any],
    cuts: Cuts,
    num_microbatches: int,
    schedule: str | Sequence[Sequence[Any]] = "1f1b",
    *,
    kwargs: Mapping[str, Any] | None = None,
    num_ranks: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    loss_weight: LossWeight = "mean",
    plan_stage: PlanStage | None = None,
) -> Pipeline:
    """Cut `model` into stages that run on torch.distributed.pipelining.

    `model(*args, **kwargs)` returns a scalar loss first; or `loss_fn(model(*args[:-1], **kwargs), args[-1])` does.
    `args`: one whole batch (real or meta), batch dimension first. `cuts`: see `fxmem.passes.stage_assign.Cuts`,
    indices in the graph of the first microbatch. `schedule`: "gpipe", "1f1b", "interleaved", "interleaved-zb",
    "looped-bfs", "zbv", "dualpipev", or a list of actions ("0F0", "1B2", "1I0", "1W0") for each rank. `num_ranks`:
    default one for each stage (half as many for V-shaped schedules). Raises OptionError, CutError, CaptureError.
    """
    name, rows = (schedule, ()) if isinstance(schedule, str) else ("actions", schedule)
    if name not in SINGLE and name not in SEVERAL and name != "actions":
        raise OptionError(f"unknown schedule {name!r}: expected one of {', '.join([*SINGLE, *SEVERAL])}, or actions")
    parts = split_batch(args, kwargs or {}, num_microbatches)
    pipeline = Pipeline(model, parts, loss_fn, loss_weight)
    pipeline.plan_stage = plan_stage
    pipeline.cut(cuts, name, rows)
    ranks = num_ranks or (pipeline.num_stages // 2 if name in V_SHAPED else pipeline.num_stages)
    pipeline.rank_of = _rank_of(name, pipeline.num_stages, ranks, rows)
    return pipeline
