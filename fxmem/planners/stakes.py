"""How much planning is worth: no more than a few hundred training steps would give back, unless the caller asks."""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.planners.problem import Problem
from fxmem.planners.registry import Options

STEPS = 500
"""So many steps have to give the time of a search back."""
_LEAST_S, _LEAST_PER_KERNEL_S = 0.1, 1e-3
_SMALLEST_SHARE, _SMALLEST_PER_KERNEL_S = 2 / 3, 0.025
_SOLVE_S, _PER_KERNEL_S, _MOST_S = 9.0, 1e-2, 30.0


@dataclass(frozen=True)
class Stakes:
    """Limits of one search, in seconds of effort: `limit_s` at most; where `solve_s` did not ask for it, at most what
    `steps` steps can win, but `least_s`. `smallest_s`: for the smallest budget, at whose stake are bytes."""

    started_s: float
    limit_s: float
    least_s: float
    smallest_s: float
    steps: float = STEPS

    def until(self, share: float, gain_s: float) -> float:
        """When to end what may take until `share` of the limit, a step being faster by `gain_s` at best after it."""
        return self.started_s + min(share * self.limit_s, max(self.least_s, self.steps * gain_s))


def default_limit_s(problem: Problem) -> float:
    """Seconds of effort that a search may take: more for more kernels."""
    return min(_MOST_S, max(_SOLVE_S, problem.num_kernels * _PER_KERNEL_S))


def stakes(problem: Problem, options: Options) -> Stakes:
    """The limits of a search that begins now. From a plan to start from, a share of the way is enough."""
    now = options.effort.now()
    if options.solve_s is not None:
        return Stakes(now, options.solve_s, options.solve_s, options.solve_s)
    share = 1.0 if options.start is None else options.start_share
    least_s = _LEAST_S + _LEAST_PER_KERNEL_S * problem.num_kernels
    limit_s = default_limit_s(problem)
    smallest_s = min(_SMALLEST_SHARE * limit_s, _SMALLEST_PER_KERNEL_S * problem.num_kernels)
    return Stakes(now, share * limit_s, share * least_s, share * smallest_s, share * STEPS)
