"""fxmem: a memory-aware training compiler for PyTorch. Name a number of bytes; training runs under it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxmem.api import CompiledFunction, CompiledModule, compile, max_batch, plan
    from fxmem.errors import (
        BudgetInfeasible,
        CaptureError,
        FxmemError,
        OffloadError,
        OptionError,
        PlanMismatch,
        VerifyError,
    )
    from fxmem.measure import Measurement, measure
    from fxmem.planning import Plan

_MODULE_OF = {
    **dict.fromkeys(("CompiledFunction", "CompiledModule", "compile", "max_batch", "plan"), "api"),
    **dict.fromkeys(
        (
            "BudgetInfeasible",
            "CaptureError",
            "FxmemError",
            "OffloadError",
            "OptionError",
            "PlanMismatch",
            "VerifyError",
        ),
        "errors",
    ),
    **dict.fromkeys(("Measurement", "measure"), "measure"),
    "Plan": "planning",
}
__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Names load when first used: planners and the simulator need no torch."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'fxmem' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fxmem.{_MODULE_OF[name]}"), name)
