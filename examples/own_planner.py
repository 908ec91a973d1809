"""A planner of your own: it sees numbers, returns a schedule, and is used by its name like any other."""

import numpy as np
import torch
from torch import nn

import fxmem
from fxmem.ir.from_fx import program_from_joint
from fxmem.planners.kernel.binding import Kernel, State
from fxmem.planners.problem import Problem
from fxmem.planners.recompute.search import infeasible, solution
from fxmem.planners.registry import Options, Solution, register
from fxmem.testing import check_planner


@register("largest-first")
def largest_first(problem: Problem, budget_bytes: int, options: Options) -> Solution:
    """Give up saved values, the largest first, until the step fits. Raises BudgetInfeasible when it never does."""
    kernel = Kernel(problem)
    state = kernel.all_saved()
    saved = np.array(state.saved)
    for storage in np.argsort(-problem.nbytes, kind="stable"):
        kernel.load(state)
        if kernel.evaluate(budget_bytes).peak_bytes <= budget_bytes:
            break
        saved[storage] = 0
        state = State(saved.copy())
    kernel.load(state)
    peak_bytes = kernel.evaluate(budget_bytes).peak_bytes
    if peak_bytes > budget_bytes:
        raise infeasible(kernel, budget_bytes, peak_bytes, state)
    return solution(kernel, state, 0.0, {"why": "largest first"})


def main() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    x = torch.randn(256, 32)
    free = fxmem.plan(model, (x,))
    program = program_from_joint(free.joint)
    for share in (0.6, 0.8):  # a plan that keeps its word, or a refusal that names what would do
        check_planner("largest-first", program, int(share * free.peak_bytes))
    mine = fxmem.plan(model, (x,), budget=0.8, planner="largest-first")
    theirs = fxmem.plan(model, (x,), budget=0.8)
    print(repr(mine), repr(theirs), sep="\n")
    assert mine.peak_bytes <= mine.budget_bytes
    step = fxmem.compile(model, budget=0.8, planner="largest-first")
    step(x).square().mean().backward()


if __name__ == "__main__":
    main()
