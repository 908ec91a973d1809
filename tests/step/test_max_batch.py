"""The largest batch under a budget, of steps that only fit where they are split."""

from __future__ import annotations

import pytest
import torch

import fxmem
from fxmem.errors import OptionError
from fxmem.ir.program import Fission
from tests.step.test_fission import Classifier

BUDGET = 8 * 2**20  # parameters and gradients take 4 MiB, and a row of scores half of one


@pytest.mark.slow
def test_splitting_allows_larger_batches_that_can_be_planned() -> None:
    module = Classifier(131072, 4)
    args = (torch.randn(4, 4), torch.randint(131072, (4,)))
    whole = fxmem.max_batch(module, args, BUDGET, fission="off", solve_s=0.1)
    parts = fxmem.max_batch(module, args, BUDGET, solve_s=0.1)
    assert parts >= 4 * whole
    larger = (torch.randn(parts, 4), torch.randint(131072, (parts,)))
    plan = fxmem.plan(module, larger, BUDGET, solve_s=0.1)
    assert plan.program.fissions
    assert plan.peak_bytes <= BUDGET
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.plan(module, larger, BUDGET, fission="off", solve_s=0.1)
    step = fxmem.compile(module, plan=plan)
    step(*larger).backward()
    module.zero_grad()
    assert fxmem.measure(lambda: step(*larger).backward()).peak_bytes <= BUDGET


def test_a_batch_of_one_is_the_least_and_regions_are_of_one_batch() -> None:
    module, args = Classifier(), (torch.randn(4, 32), torch.randint(2048, (4,)))
    with pytest.raises(fxmem.BudgetInfeasible, match="a batch of 1"):
        fxmem.max_batch(module, args, 400_000)
    with pytest.raises(OptionError, match="of one batch"):
        fxmem.max_batch(module, args, 2**20, fission=[Fission(0, 0, (0, 2, 4))])
