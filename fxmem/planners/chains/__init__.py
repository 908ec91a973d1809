"""Planners for chains of blocks: revolve, rotor, offloading, POFO, their brute-force references and their simulator."""

from fxmem.planners.chains.model import BlockOption, Chain, ChainError, homogeneous
from fxmem.planners.chains.plan import CHAIN_PLANNERS, ChainPlan, judge
from fxmem.planners.chains.simulate import ChainRun, simulate

__all__ = [
    "CHAIN_PLANNERS",
    "BlockOption",
    "Chain",
    "ChainError",
    "ChainPlan",
    "ChainRun",
    "homogeneous",
    "judge",
    "simulate",
]
