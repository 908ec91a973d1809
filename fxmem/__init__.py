"""fxmem: a memory-aware training compiler for PyTorch. Name a number of bytes; training runs under it."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxmem.api import CompiledFunction, CompiledModule, compile, max_batch, plan, step_of
    from fxmem.capture.hints import keep, recompute
    from fxmem.errors import (
        BudgetInfeasible,
        CaptureError,
        FxmemError,
        OffloadError,
        OptionError,
        PlanMismatch,
        VerifyError,
    )
    from fxmem.pipelining.planned import PlannedPipeline, pipeline
    from fxmem.planners.plan import Plan
    from fxmem.step.measurement import Measurement, measure

__all__ = [
    "BudgetInfeasible",
    "CaptureError",
    "CompiledFunction",
    "CompiledModule",
    "FxmemError",
    "Measurement",
    "OffloadError",
    "OptionError",
    "Plan",
    "PlanMismatch",
    "PlannedPipeline",
    "VerifyError",
    "compile",
    "keep",
    "max_batch",
    "measure",
    "pipeline",
    "plan",
    "recompute",
    "step_of",
]
_MODULES = ("errors", "capture.hints", "planners.plan", "step.measurement", "api", "pipelining.planned")


def __getattr__(name: str) -> Any:
    """Names load when first used: planners and the simulator need no torch."""
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"fxmem.{module}")).get(name)
            if found is not None:
                globals()[name] = found
                return found
    if name == "__version__":
        return importlib.metadata.version("fxmem")
    raise AttributeError(f"module 'fxmem' has no attribute {name!r}")
