"""torch's schedules with fxmem's step: microbatches of any size, weighted losses, shared gradients summed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fxmem import compat
from fxmem.errors import FxmemError, OptionError
from fxmem.runtime.pipeline.arrivals import Arrivals, Message
from fxmem.runtime.pipeline.batch import LossWeight, loss_weights, split_batch
from fxmem.runtime.pipeline.params import verify_plain
from fxmem.runtime.pipeline.stage import Stage
from fxmem.runtime.pipeline.traced import Autocast

SINGLE = {"gpipe": "GPipe", "1f1b": "1F1B"}
SEVERAL = {
    "looped-bfs": "LoopedBFS",
    "interleaved": "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
V_SHAPED = frozenset({"zbv", "dualpipev"})
_LOST = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "peer", "broken pipe")


class PipelineError(FxmemError):
    """A step could not be completed because another rank stopped answering."""


class Scheduled(Protocol):
    """What of a `Pipeline` its schedule reads."""

    num_microbatches: int
    schedule_name: str
    rows: Sequence[Sequence[Any]]
    loss_weight: LossWeight

    @property
    def num_stages(self) -> int: ...


class PlannedSteps:
    """Mixed into one of torch's schedules: `step` and `eval` for stages made by fxmem."""

    pipeline: Scheduled
    own_stages: list[Stage]
    _has_backward: bool
    _n_microbatches: int

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """One step on a whole batch, given on every rank; `target` is one more positional argument of the model.

        Returns the loss of the batch on the rank of the last stage, None elsewhere; `losses` gets the microbatches'.
        Gradients are added to `grad` of the parameters. Raises PipelineError when another rank is gone.
        """
        everything = args if target is None else (*args, target)
        parts = split_batch(everything, kwargs, self._n_microbatches)
        weights = loss_weights(parts, self.pipeline.loss_weight)
        for stage in self.own_stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
            stage.begin(parts, weights)
        found: list[Tensor] = []
        try:
            self._prepare()
            with Autocast.of(self.own_stages[0].device)._replace(is_on=False).set():  # casts are in the graphs
                self._run(found)
            if self._has_backward:
                first = self.own_stages[0]
                first.parameters.reduce_shared(first.group_rank, first.group)
        except Exception as error:
            self._fail(error)
        finally:
            for stage in self.own_stages:
                stage.clear_runtime_states()
                stage.begin((), ())
        if losses is not None:
            losses[:] = found
        if not found:
            return None
        return torch.stack([loss * weight for loss, weight in zip(found, weights, strict=True)]).sum()

    def _prepare(self) -> None:
        """Have all that the step will run, so that what is refused is refused on all ranks before anything moves.

        Raises CaptureError, CutError, OptionError.
        """
        several: Counter[str] = Counter()
        for stage in self.own_stages:
            verify_plain(stage.submod)
            codes = [stage.code(chunk) for chunk in range(self._n_microbatches)]
            several.update(stage.gradient_names(codes[0]) if self._has_backward else ())
        self.own_stages[0].parameters.verify_hooks(name for name, count in several.items() if count > 1)

    def _run(self, losses: list[Tensor]) -> None:
        count = self._n_microbatches
        self._step_microbatches([()] * count, [{}] * count, [None] * count, losses)  # type: ignore[attr-defined]

    def _fail(self, error: Exception) -> None:
        self._internal_losses: list[Tensor] = []
        self.own_stages[0].parameters.forget_step()
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, FxmemError) or not any(word in message.lower() for word in _LOST):
            raise error
        stages = [stage.stage_index for stage in self.own_stages]
        line = message.splitlines()[0]
        raise PipelineError(
            f"rank {self.own_stages[0].group_rank} (stages {stages}): another rank stopped answering in the middle of "
            f"a step, whose gradients are incomplete: {line}"
        ) from error


def make_schedule(pipeline: Scheduled, stages: Sequence[Stage]) -> Any:
    """The torch schedule of `pipeline` for the stages of this rank. Raises OptionError where torch refuses it."""
    torch_module = compat.pipelining()
    name, count = pipeline.schedule_name, pipeline.num_microbatches
    use_single = name in SINGLE and len(stages) == 1 and count >= pipeline.num_stages
    is_list = not use_single and (name in SINGLE or name == "actions")
    base = torch_module._PipelineScheduleRuntime
    if not is_list:
        base = torch_module.get_schedule_class(SINGLE[name] if use_single else SEVERAL[name])
    kind = type(f"Planned{base.__name__}", (PlannedSteps, base), {})
    try:
        made = kind(stages[0] if use_single else list(stages), count, loss_fn=_given_loss, scale_grads=False)
        if is_list:
            rows = pipeline.rows
            actions = {rank: [torch_module._Action.from_str(str(a)) for a in row] for rank, row in enumerate(rows)}
            made.pipeline_order = actions
            made._prepare_schedule_with_comms(actions)
    except (ValueError, AssertionError) as error:
        raise OptionError(f"torch can't build schedule {name!r}: {error}") from error
    made.pipeline, made.own_stages = pipeline, list(stages)
    if hasattr(made, "pipeline_order_with_comms"):
        _release_sends(made, torch_module)
    return made


def _given_loss(output: Tensor, target: None) -> Tensor:
    """The loss is in the graph: the last stage returns it."""
    return output


def _release_sends(made: Any, torch_module: Any) -> None:
    """Drop sent tensors once they have arrived; torch's runtime would keep all of them to the end of the step."""
    posted: dict[Message, list[Any]] = {}
    stages = {stage.stage_index: stage for stage in made.own_stages}
    rows = [compat.transfers_of(made.pipeline_order_with_comms[rank]) for rank in range(made.pp_group_size)]
    arrivals = Arrivals(rows)

    def release() -> None:
        for message in [m for m in posted if arrivals.has_arrived(m)]:
            torch_module._wait_batch_p2p(posted.pop(message))

    def use(kind: str, stage: int, chunk: int) -> None:
        arrivals.use(kind, stage, chunk)
        release()

    def post(kind: str) -> Any:
        def run(action: Any, context: Any) -> None:
            stage, chunk = action.stage_index, action.microbatch_index
            ops = (stages[stage].get_fwd_send_ops if kind == "F" else stages[stage].get_bwd_send_ops)(chunk)
            posted[kind, stage, chunk] = torch_module._batch_p2p(ops)

        return run

    for stage in made.own_stages:
        stage.on_use = use
    made._comp_type_to_function_map[torch_module._ComputationType.SEND_F] = post("F")
    made._comp_type_to_function_map[torch_module._ComputationType.SEND_B] = post("B")
    run = made._run

    def run_and_wait(losses: list[Tensor]) -> None:
        arrivals.forget()
        try:
            run(losses)
            for works in posted.values():
                torch_module._wait_batch_p2p(works)
        finally:
            posted.clear()

    made._run = run_and_wait
