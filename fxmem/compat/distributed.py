"""torch.distributed: its store, FSDP2, its pipelining engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel


def default_store() -> Any:
    """The key-value store of the default process group; None where there is none."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.distributed_c10d._get_default_store()


class _Reducers:
    """The modules of this process that DistributedDataParallel wraps: looked for once, later ones are heard of."""

    def __init__(self) -> None:
        self.found: weakref.WeakSet[torch.nn.Module] | None = None

    def any(self) -> bool:
        if self.found is None:
            register_module_module_registration_hook(self._heard)
            # type(): to ask a proxy for its class may run anybody's code
            self.found = weakref.WeakSet(x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel))
        return bool(self.found)

    def _heard(self, module: torch.nn.Module, _: str, __: torch.nn.Module | None) -> None:
        if self.found is not None and isinstance(module, DistributedDataParallel):
            self.found.add(module)


_reducers = _Reducers()


def has_reducer() -> bool:
    """Is any module of this process wrapped by DistributedDataParallel?"""
    return default_store() is not None and _reducers.any()


def is_fully_sharded(module: torch.nn.Module) -> bool:
    """Did `torch.distributed.fsdp.fully_shard` (FSDP2) take this module?"""
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def shard_bytes(module: torch.nn.Module) -> int:
    """Bytes of the shards that FSDP2 holds of parameters that are whole at the moment."""
    parameters = _sharded_parameters(module)
    return sum(p._sharded_param_data.nbytes for p in parameters if p.sharded_state.name == "UNSHARDED")


def gathered_bytes(module: torch.nn.Module) -> int:
    """Bytes that FSDP2 gathers at once for this module, on all ranks; 0 where it gathers nothing."""
    parameters = _sharded_parameters(module)
    return sum(p._orig_size.numel() * p.sharded_param.element_size() for p in parameters)


def _sharded_parameters(module: torch.nn.Module) -> Sequence[Any]:
    """FSDP2's own view of the parameters that it gathers for this module."""
    if not is_fully_sharded(module):
        return ()
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    return group.fsdp_params if group is not None else ()


def pipelining() -> Any:
    """torch.distributed.pipelining's schedules module: `_PipelineScheduleRuntime`, `_Action`, `_batch_p2p`, ..."""
    from torch.distributed.pipelining import schedules

    return schedules


def with_transfers(rows: Sequence[Sequence[str]], rank_of: Sequence[int]) -> list[list[tuple[int, str, int]]]:
    """A compute-only pipeline schedule, its action names by rank, with the sends and receives torch's runtime adds.

    Actions are (stage, kind, microbatch), kinds as torch names them: "F", "B", "I", "W", "SEND_F", "RECV_B", ...
    """
    from torch.distributed.pipelining import schedules

    actions: dict[int, list[Any]] = {
        rank: schedules._add_unshard_reshard([schedules._Action.from_str(name) for name in row])
        for rank, row in enumerate(rows)
    }
    count = 1 + max(a.microbatch_index for row in actions.values() for a in row if a.microbatch_index is not None)
    actions = {rank: schedules._add_reduce_grad(row, count) for rank, row in actions.items()}
    order = schedules._add_send_recv(actions, stage_to_rank=lambda s: rank_of[s], num_stages=len(rank_of))
    return [transfers_of(order[rank]) for rank in sorted(order)]


def transfers_of(actions: Iterable[Any]) -> list[tuple[int, str, int]]:
    """torch's pipeline actions as (stage, kind, microbatch), overlapped ones one after the other, no others."""
    flat = [part for action in actions for part in (action.sub_actions or (action,))]
    chosen = (a for a in flat if a.microbatch_index is not None)
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in chosen]
