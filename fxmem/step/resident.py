"""Bytes that stand on the device beside what a captured graph takes as input."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.capture.fakes import modules_of
from fxmem.errors import OptionError
from fxmem.ir.program import Program
from fxmem.step.parallel import parallel_bytes


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind `tensors`."""
    parts = (part for t in tensors if t is not None for part in compat.strided_parts(t))
    found = {compat.storage_key(part): int(compat.storage_nbytes(part)) for part in parts}
    return sum(found.values())


def parameters_of(*functions: Callable[..., Any]) -> list[nn.Parameter]:
    """Parameters of every module reachable from `functions`, each once."""
    found = {id(p): p for module in modules_of(*functions) for p in module._parameters.values() if p is not None}
    return list(found.values())


def gradient_bytes(parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of the gradients that exist now."""
    return storage_bytes(p.grad for p in parameters)


def beside_graph_bytes(functions: Iterable[Callable[..., Any]], program: Program, first_graph: bool) -> int:
    """Parameters and buffers of `functions` that the graph does not take.

    For the first of several graphs of a step also the gradients of those parameters, which stand before its backward.
    """
    tensors = _tensors_of(functions)
    nbytes = program.nbytes()
    in_graph = sum(nbytes[s] for s in {s for i in program.static for s in program.ops[i].storages})
    beside = max(0, storage_bytes(tensors) - in_graph) + parallel_bytes(*functions)
    if not first_graph:
        return beside
    trainable = storage_bytes(p for p in parameters_of(*functions) if p.requires_grad)
    return beside + max(0, trainable - in_graph)


def model_bytes(own: Iterable[Callable[..., Any]], others: Collection[Callable[..., Any]]) -> int:
    """Parameters, gradients and buffers of `others`, those left out that `own` has too."""
    if not others:
        return 0
    known = {id(t) for t in _tensors_of(own)}
    found = [t for t in _tensors_of(others) if id(t) not in known]
    return storage_bytes(found) + storage_bytes(t for t in found if t.requires_grad)


def _tensors_of(functions: Iterable[Callable[..., Any]]) -> list[Tensor]:
    found = (t for m in modules_of(*functions) for t in (*m._parameters.values(), *m._buffers.values()))
    return [t for t in found if t is not None]


def optimizer_bytes(optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the optimizer's state, after a step if it has none yet (found by one step on meta tensors).

    Raises OptionError when the optimizer can't run on meta tensors and has no state.
    """
    if optimizer is None:
        return 0
    state = optimizer.state or _state_after_step(optimizer)
    return storage_bytes(
        value for per_parameter in state.values() for value in per_parameter.values() if torch.is_tensor(value)
    )


def _state_after_step(optimizer: torch.optim.Optimizer) -> Any:
    groups = []
    for group in optimizer.param_groups:
        stand_ins = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for stand_in in stand_ins:
            stand_in.grad = torch.empty_like(stand_in)
        groups.append({**group, "params": stand_ins, "fused": None, "capturable": False})
    try:
        taken = inspect.signature(type(optimizer)).parameters  # AdamW notes defaults that it does not take
        given = {k: v for k, v in optimizer.defaults.items() if k in taken and k not in ("fused", "capturable")}
        probe = type(optimizer)(groups, **given)
        probe.step()
    except Exception as error:
        raise OptionError(f"can't tell the state size of {type(optimizer).__name__}: take one step first") from error
    return probe.state
