"""The public surface: `compile`, `plan`, `max_batch`, `step_of`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch

from fxmem import compat
from fxmem.budget import Budget
from fxmem.capture import capture
from fxmem.capture.loss import with_loss
from fxmem.capture.outputs import with_outputs
from fxmem.errors import OptionError
from fxmem.ir.program import Program
from fxmem.options import OptionDict, Settings, settings
from fxmem.planners.plan import Plan
from fxmem.step.ahead import plan_captured
from fxmem.step.resident import beside_graph_bytes, gradient_bytes, optimizer_bytes, parameters_of
from fxmem.wrapper import CompiledFunction, CompiledModule, step_of, wrap

__all__ = ["CompiledFunction", "CompiledModule", "compile", "max_batch", "plan", "step_of"]


def compile(
    model: Callable[..., Any], budget: Budget = None, **options: Unpack[OptionDict]
) -> CompiledModule | CompiledFunction:
    """Compile `model` (a module or any differentiable callable): a training step's measured peak stays under `budget`.

    `budget`: allocated bytes of the model's device during one forward and backward: parameters, buffers, inputs,
    gradients (existing and new), saved tensors, temporaries, workspaces, optimizer state if named. An int, "6GiB", a
    float in (0, 1] (fraction of the unplanned peak), "min", or None. Options: see `fxmem.options.Settings`.

    The graph is captured and planned at the first call. The first step is measured; over the budget, it is planned
    again with less. Raises OptionError at once; at the first step BudgetInfeasible, CaptureError, PlanMismatch.
    """
    return wrap(model, settings(budget, **options))


def plan(
    model: Callable[..., Any],
    args: Sequence[Any],
    budget: Budget = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[OptionDict],
) -> Plan:
    """Plan one training step of `model(*args, **kwargs)` ahead of time; the model is never run.

    Parameters and `args` may be real, fake or meta tensors; only if all are real, single ops are measured that never
    were on this device. A model that breaks into several graphs is planned as one step, without what the code between
    them holds. Raises CaptureError, OptionError, BudgetInfeasible.
    """
    made = settings(budget, **options)
    if not isinstance(args, (tuple, list)):
        raise OptionError(f"args must be a tuple of the model's arguments, not {type(args).__name__}")
    function = with_outputs(with_loss(model, made.loss_fn), made.outputs)
    joints = capture(function, args, kwargs, dynamic=bool(made.dynamic), frontend=made.capture)
    resident_bytes = functools.partial(_resident_bytes, model, made)
    return plan_captured(joints, made, made.budget, resident_bytes, may_run=_all_real(model, args, kwargs))


def max_batch(
    model: Callable[..., Any],
    args: Sequence[Any],
    budget: Budget,
    *,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[OptionDict],
) -> int:
    """The largest batch that fits `budget`, from the symbolic peak, without trial runs of the model.

    `args`: a batch of any size >= 2, batch dimension first in every tensor. Recomputation (and offloading, if `tiers`
    are named) may be used to the full. Raises BudgetInfeasible if not even one row fits.
    """
    from fxmem.step.max_batch import largest_batch

    made = settings(budget, **{**options, "dynamic": True})
    resident_bytes = functools.partial(_resident_bytes, model, made)
    may_run = _all_real(model, args, kwargs)
    function = with_outputs(with_loss(model, made.loss_fn), made.outputs)
    return largest_batch(function, args, kwargs, made, resident_bytes, may_run)


def _all_real(model: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    tensors = [*parameters_of(model), *compat.tree_leaves((tuple(args), dict(kwargs or {})))]
    return not any(isinstance(t, torch.Tensor) and (t.is_meta or isinstance(t, compat.FakeTensor)) for t in tensors)


def _resident_bytes(model: Callable[..., Any], made: Settings, program: Program) -> int:
    beside = beside_graph_bytes([model], program, first_graph=False)
    return beside + gradient_bytes(parameters_of(model)) + optimizer_bytes(made.optimizer)
