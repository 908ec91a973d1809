"""Planners: facts and a budget in, a schedule out. One planner a module, found by name."""

from fxmem.planners.registry import PLANNERS, Options, Solution, get_planner, register

__all__ = ["PLANNERS", "Options", "Solution", "get_planner", "register"]
