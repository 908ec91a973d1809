"""The classic partitioners: equal layers, equal parameters, equal time, each under 1F1B with its own in-flight
counts.
"""

from __future__ import annotations

import numpy as np

from fxmem.pipelining.chain import FloatArray
from fxmem.pipelining.evaluate import Cuts
from fxmem.pipelining.partition.base import Clock, Problem, best_of, finish
from fxmem.pipelining.partition.proposals import balanced
from fxmem.pipelining.plan import PipelinePlan


def weights(problem: Problem, name: str) -> FloatArray:
    """What `name` balances, per block."""
    columns = problem.chain.columns
    return {
        "layers": np.ones(len(problem.chain)),
        "parameters": columns["num_parameters"],
        "time": columns["total_s"],
    }[name]


def cuts_by(problem: Problem, name: str) -> Cuts:
    """The cuts that minimise the largest stage's layers, parameters or seconds."""
    return balanced(weights(problem, name), problem.cluster.num_devices)


def _plan(name: str, problem: Problem) -> PipelinePlan:
    clock, evaluator = Clock(), problem.evaluator()
    candidate = best_of(evaluator, [(cuts_by(problem, name), problem.standard)])
    return finish(name, problem, evaluator, candidate, clock)


def plan_layers(problem: Problem) -> PipelinePlan:
    """As many blocks on every stage as on any other."""
    return _plan("layers", problem)


def plan_parameters(problem: Problem) -> PipelinePlan:
    """Parameter counts balanced."""
    return _plan("parameters", problem)


def plan_time(problem: Problem) -> PipelinePlan:
    """Forward plus backward seconds balanced: the least maximum stage time."""
    return _plan("time", problem)
