"""Typed schedules over a `Program`, and the one simulator that judges them."""

from fxmem.schedule.actions import Action, Compute, Free, Offload, Recompute, Reload, StartBackward, Wait
from fxmem.schedule.simulate import Machine, SimResult, simulate

__all__ = [
    "Action",
    "Compute",
    "Free",
    "Machine",
    "Offload",
    "Recompute",
    "Reload",
    "SimResult",
    "StartBackward",
    "Wait",
    "simulate",
]
