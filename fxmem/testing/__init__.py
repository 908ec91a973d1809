"""Property-based testing of graph rewriting: random models, graphs, programs and plans, and what must hold of them.

Strategies for hypothesis: `modules`, `graph_modules`, `joint_graphs`, `programs`, `schedules`, `plans`, `transfers`.
Invariants, each of which raises AssertionError: `check_pass`, `check_gradients`, `check_rewrite`, `check_program`,
`check_schedule`, `check_plan`, `check_planner`, `check_layout`, `check_engine`. What a strategy draws prints as code
that makes it again: `DrawnModule`, `graph_module`, `joint_graph`.

Names are imported when they are first used: `fxmem.testing.zoo` needs no hypothesis.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxmem.testing.pass_checks import check_gradients, check_pass
    from fxmem.testing.plan_checks import check_plan, check_planner, check_program, check_rewrite
    from fxmem.testing.random_graphs import graph_module, graph_modules, joint_graph, joint_graphs
    from fxmem.testing.random_modules import FEATURES, DrawnModule, modules
    from fxmem.testing.random_programs import Shape, check_schedule, oracle_peak_bytes, plans, programs, schedules
    from fxmem.testing.random_transfers import check_engine, check_layout, transfers

__all__ = [
    "FEATURES",
    "DrawnModule",
    "Shape",
    "check_engine",
    "check_gradients",
    "check_layout",
    "check_pass",
    "check_plan",
    "check_planner",
    "check_program",
    "check_rewrite",
    "check_schedule",
    "graph_module",
    "graph_modules",
    "joint_graph",
    "joint_graphs",
    "modules",
    "oracle_peak_bytes",
    "plans",
    "programs",
    "schedules",
    "transfers",
]
_HOMES = ("random_modules", "random_graphs", "random_programs", "random_transfers", "pass_checks", "plan_checks")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"fxmem.testing.{home}")
            if name in vars(module):
                globals()[name] = vars(module)[name]
                return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
