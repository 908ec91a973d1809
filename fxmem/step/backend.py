"""`torch.compile(model, backend="fxmem", options={"budget": "6GiB"})`, and `model.compile(...)` with the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxmem import compat
from fxmem.errors import FxmemError, OptionError
from fxmem.options import Settings, settings
from fxmem.step.compiled import Step

_NOT_HERE = {
    "loss_fn": "the backend plans what torch.compile is given: put the loss into it, or use fxmem.compile",
    "capture": "torch.compile captures by Dynamo; use fxmem.compile",
    "dynamic": "it is torch.compile's own: torch.compile(model, dynamic=True, ...)",
}
compat.compile_torch_modules_in_place("fxmem")
_steps: list[tuple[weakref.ref[Any], Step]] = []  # by call of torch.compile, which can be compared but has no hash


def fxmem_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """The Dynamo backend, found through the `torch_dynamo_backends` entry point.

    `options`: those of `fxmem.compile`. The graphs of one call of torch.compile make up one step under the budget;
    `fxmem.step_of` reaches it. Raises OptionError, BudgetInfeasible, CaptureError as themselves.
    """
    try:
        return _step_for(module, _checked(options, others)).backend(module, example_inputs)
    except FxmemError as error:
        raise compat.past_dynamo(error) from None


def step_of_torch_compile(compiled: Callable[..., Any]) -> Step | None:
    """The step of what torch.compile returned, or of a module compiled in place; None before a graph was captured.

    Dynamo shares compiled code between calls with equal options that compile the same code; they have one step, too.
    """
    call = compat.torch_compile_call_of(compiled)
    made = [(other, step) for ref, step in _steps if (other := ref()) is not None]
    return next((s for other, s in made if other is call), next((s for other, s in made if other == call), None))


def _step_for(module: fx.GraphModule, made: Settings) -> Step:
    call, function = compat.torch_compile_call()
    found = next((step for ref, step in _steps if ref() is call), None) if call is not None else None
    if found is not None:
        return found
    step = next((s for ref, s in _steps if s.is_in_forward and ref() == call), None) if call is not None else None
    if step is not None:
        step.join(function or module)
    else:
        step = Step(function or module, made)
    if call is not None:
        _steps[:] = [(ref, other) for ref, other in _steps if ref() is not None]
        _steps.append((weakref.ref(call), step))
        compat.hold_settings()
    return step


def _checked(options: Any, others: Mapping[str, Any]) -> Settings:
    if others:
        raise OptionError(f"the backend takes options={{...}}, not {', '.join(others)}")
    if not isinstance(options, Mapping | None):
        raise OptionError(f"options must be a dict of fxmem.compile's options, not {type(options).__name__}")
    for name, why in _NOT_HERE.items():
        if name in (options or {}):
            raise OptionError(f"option {name!r} is not one of the backend's: {why}")
    return settings(**{str(name): value for name, value in (options or {}).items()})
