"""Pipeline planners by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxmem.errors import OptionError
from fxmem.pipelining.chain import Chain, Cluster
from fxmem.pipelining.curves import Recompute
from fxmem.pipelining.partition.auto import plan_auto
from fxmem.pipelining.partition.base import Problem
from fxmem.pipelining.partition.layers import plan_layers, plan_parameters, plan_time
from fxmem.pipelining.partition.madpipe import plan_madpipe
from fxmem.pipelining.partition.mcap import plan_mcap, plan_mcap_paper
from fxmem.pipelining.partition.memflow import plan_memflow
from fxmem.pipelining.partition.onefoneb_star import plan_onefoneb_star
from fxmem.pipelining.partition.periodic_ilp import plan_periodic_ilp
from fxmem.pipelining.plan import PipelinePlan

PLANNERS: dict[str, Callable[..., PipelinePlan]] = {
    "auto": plan_auto,
    "layers": plan_layers,
    "parameters": plan_parameters,
    "time": plan_time,
    "mcap": plan_mcap,
    "mcap-paper": plan_mcap_paper,
    "1f1b-star": plan_onefoneb_star,
    "periodic-ilp": plan_periodic_ilp,
    "madpipe": plan_madpipe,
    "memflow": plan_memflow,
}


def plan_pipeline(
    chain: Chain,
    cluster: Cluster,
    num_microbatches: int,
    *,
    planner: str = "auto",
    recompute: Recompute = "optimal",
    **options: Any,
) -> PipelinePlan:
    """Cut `chain` over `cluster` with the named planner; `options` go to it.

    Raises OptionError for an unknown name or a chain with fewer blocks than devices, BudgetInfeasible if nothing fits.
    """
    if planner not in PLANNERS:
        raise OptionError(f"unknown pipeline planner {planner!r}: expected one of {', '.join(PLANNERS)}")
    return PLANNERS[planner](Problem(chain, cluster, num_microbatches, recompute), **options)
