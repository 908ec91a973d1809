"""A stage of torch.distributed.pipelining that runs fxmem's graphs instead of a module under autograd.

torch's schedules call `forward_one_chunk`, `backward_one_chunk`, `backward_weight_one_chunk` and the methods that post
receives and sends; all of them are overridden, so that nothing is kept longer than the graphs say: receive buffers
exist from when they are posted to when forward has used them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fxmem.passes.stage_split import StageGraph
from fxmem.runtime.pipeline.batch import Microbatch
from fxmem.runtime.pipeline.code import StageCode
from fxmem.runtime.pipeline.params import Parameters
from fxmem.runtime.pipeline.sink import Sink
from fxmem.runtime.pipeline.traced import Autocast


class Mode(NamedTuple):
    """How a graph is captured: with a backward or not, the modules' mode, and the autocast around the step."""

    has_backward: bool
    is_training: bool
    autocast: Autocast


CodeOf = Callable[[int, Microbatch, Mode], StageCode]
"""(stage, microbatch, mode) -> what it runs."""


class Stage(PipelineStage):
    """One stage on this rank; `submod` holds its parameters and buffers under the model's own names."""

    def __init__(
        self,
        index: int,
        num_stages: int,
        submod: nn.Module,
        parameters: Parameters,
        canonical: Callable[[StageGraph, str], str],
        code_of: CodeOf,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(submod, index, num_stages, parameters.device, group=group)
        self.parameters = parameters
        self._canonical, self._code_of = canonical, code_of
        self.on_use: Callable[[str, int, int], None] | None = None
        """Called with ("F" or "B", stage, microbatch) when a message from another stage is about to be used."""
        self._parts: Sequence[Microbatch] = ()
        self._weights: Sequence[float] = ()
        self.clear_runtime_states()

    # one step

    def begin(self, parts: Sequence[Microbatch], weights: Sequence[float]) -> None:
        """Take the microbatches of the coming step and the factors of their losses."""
        self._parts, self._weights = parts, weights
        is_training = self.submod.training
        self._mode = Mode(self.has_backward or is_training, is_training, Autocast.of(self.device))

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._received: dict[int, list[Tensor]] = {}
        self._results: dict[int, tuple[Tensor, ...]] = {}
        self._saved: dict[int, list[Any]] = {}
        self._received_grads: dict[int, list[Tensor]] = {}
        self._result_grads: dict[int, tuple[Tensor, ...]] = {}
        self._for_weights: dict[int, list[Any]] = {}

    @property
    def num_saved(self) -> int:
        """Microbatches whose saved tensors are held now."""
        return len(self._saved)

    def code(self, chunk: int) -> StageCode:
        return self._code_of(self.stage_index, self._parts[chunk], self._mode)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run forward; returns what goes to the next stage, or the microbatch's loss (the first output)."""
        code = self.code(fwd_chunk_id)
        graph, tensors = code.graph, self._parts[fwd_chunk_id].tensors
        inputs: list[Any] = [self._static(code, name) for name in graph.statics]
        inputs += [tensors[position].to(self.device) for position in code.data_positions]
        inputs += self._received.pop(fwd_chunk_id, [])
        if not self.is_first:
            self._was_used("F", fwd_chunk_id)
        with torch.no_grad():
            results = code.forward(inputs)
        values, saved = tuple(results[: code.num_results]), list(results[code.num_results :])
        if self.has_backward:
            self._saved[fwd_chunk_id] = saved
        if self.is_last:
            return values[0].clone()  # kept to the end of the step; mse_loss leaves it in a storage of the input's size
        if not self._is_here(self.stage_index + 1):
            self._results[fwd_chunk_id] = values
        return values

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward, or only its part that gives input gradients; gradients of parameters are accumulated."""
        if not self.has_backward:
            return
        code = self.code(bwd_chunk_id)
        inputs = self._saved.pop(bwd_chunk_id) + self._incoming(bwd_chunk_id, code)
        held = [] if full_backward else [inputs[position] for position in code.split.held]
        inputs.append(self._sink(code))
        with torch.no_grad():
            results = list((code.backward if full_backward else code.input_backward)(inputs))
        num_sends = len(code.graph.grad_sends)
        self._result_grads[bwd_chunk_id] = tuple(results[:num_sends])
        if not full_backward:
            self._for_weights[bwd_chunk_id] = held + results[num_sends:]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the rest of a backward that was split."""
        if not self.has_backward:
            return
        code = self.code(bwd_chunk_id)
        with torch.no_grad():
            code.weight_backward([*self._for_weights.pop(bwd_chunk_id), self._sink(code)])

    def _incoming(self, chunk: int, code: StageCode) -> list[Tensor]:
        if not self.is_last:
            received = self._received_grads.pop(chunk)
            self._was_used("B", chunk)
            return received
        (tangent,) = code.tangents
        return [torch.full((), self._weights[chunk], dtype=tangent.dtype, device=self.device)]

    def gradient_names(self, code: StageCode) -> list[str]:
        """The parameter of each gradient that a backward delivers."""
        return [self._canonical(code.graph, name) for name in code.graph.gradients]

    def _sink(self, code: StageCode) -> Sink:
        names = self.gradient_names(code)

        def add(position: int, gradient: Tensor, is_own: bool) -> None:
            self.parameters.accumulate(names[position], gradient, is_own)

        return add

    def _static(self, code: StageCode, name: str) -> Tensor | None:
        """The parameter or buffer; None for one that nothing reads and another stage holds."""
        return self.parameters.tensors.get(self._canonical(code.graph, name))

    def _was_used(self, kind: str, chunk: int) -> None:
        if self.on_use is not None:
            self.on_use(kind, self.stage_index, chunk)

    def _is_here(self, stage: int) -> bool:
        """Does `stage` run on this rank?"""
        return self.stage_index_to_group_rank.get(stage) == self.group_rank

    # messages

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        graph = self.code(fwd_chunk_id).graph
        self._received[fwd_chunk_id] = self._buffers(graph.values(graph.receives))
        return self._ops(dist.irecv, self._received[fwd_chunk_id], self.stage_index - 1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        return self._ops(dist.isend, self._results.pop(fwd_chunk_id), self.stage_index + 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        graph = self.code(bwd_chunk_id).graph
        self._received_grads[bwd_chunk_id] = self._buffers(graph.values(graph.grad_receives))
        return self._ops(dist.irecv, self._received_grads[bwd_chunk_id], self.stage_index + 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        return self._ops(dist.isend, self._result_grads.pop(bwd_chunk_id), self.stage_index - 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        graph = self.code(mb_index).graph
        self._received[mb_index] = _dense(prev_stage_outputs, graph.values(graph.receives))

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        return self._result_grads.pop(mb_index, ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            graph = self.code(mb_index).graph
            self._received_grads[mb_index] = _dense(next_stage_bwd_outputs, graph.values(graph.grad_receives))

    def _buffers(self, like: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype, device=self.device) for v in like]

    def _ops(self, op: Any, tensors: Sequence[Tensor], other: int) -> list[dist.P2POp]:
        peer = self.stage_index_to_group_rank[other]
        peer = peer if self.group is None else dist.get_global_rank(self.group, peer)
        return [dist.P2POp(op, _packed(tensor), peer, self.group) for tensor in tensors]

    # what schedules prepare before the first step: shapes are known, so there is nothing to infer or to send

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches
        self.args_recv_info = dict.fromkeys(range(num_microbatches), ())

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: losses are weighted, and shared gradients are summed after the step."""


def _packed(tensor: Tensor) -> Tensor:
    """The bytes of `tensor` as a contiguous tensor: its dimensions in order of falling stride."""
    order = sorted(range(tensor.dim()), key=lambda d: (tensor.stride(d), tensor.size(d)), reverse=True)
    return tensor.permute(order).contiguous()


def _dense(tensors: Sequence[Any], like: Sequence[Tensor]) -> list[Tensor]:
    """What a message would have turned `tensors` into: strides as the receiver's graph expects them."""
    made = []
    for tensor, wanted in zip(tensors, like, strict=True):
        if tensor.stride() != wanted.stride():
            tensor = torch.empty_strided(
                wanted.size(), wanted.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(tensor)
        made.append(tensor)
    return made
