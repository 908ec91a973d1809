"""`torch.compile(model, backend="fxmem", options={"budget": "6GiB"})`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from fxmem.options import settings
from fxmem.step.compiled import Step


def fxmem_backend(
    module: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The Dynamo backend, found through the `torch_dynamo_backends` entry point.

    `options`: those of `fxmem.compile`. Each graph that Dynamo hands over gets a plan of its own under the budget,
    verified when it first runs. Raises OptionError, BudgetInfeasible.
    """
    return Step(module, settings(**(options or {}))).backend(module, example_inputs)
