"""Planned models under DistributedDataParallel: pytorch#104674, #108966."""

import copy
import faulthandler
import gc
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxmem
from fxmem import compat
from tests.models import blocks
from tests.step.test_fission import Classifier

ROOT = Path(__file__).parents[2]


def check_rank(rank: int, store: str) -> None:
    """Gradients of three steps equal to unplanned DDP's, another batch on each rank; the budget is kept."""
    faulthandler.dump_traceback_later(300, exit=True)  # a hang says where
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    module, _ = blocks(num_blocks=3)
    reference, inner = copy.deepcopy(module), copy.deepcopy(module)
    torch.manual_seed(1 + rank)
    args = (torch.randn(128, 32), torch.randn(128, 32))
    parallel = DistributedDataParallel(reference)
    parallel(*args).backward()
    around = fxmem.compile(DistributedDataParallel(module), budget=0.8, solve_s=0.3)
    within = fxmem.compile(inner, budget=0.8, solve_s=0.3)
    for model, step, planned in ((module, around, around), (inner, DistributedDataParallel(within), within)):
        for _ in range(3):
            model.zero_grad()
            step(*args).backward()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(mine.grad, theirs.grad)
        model.zero_grad()
        peak_bytes = fxmem.measure(lambda step=step: step(*args).backward()).peak_bytes
        assert peak_bytes <= planned.plan.budget_bytes < planned.plan.baseline_peak_bytes
        assert planned.plan.extra_s > 0
    for budget in (0.5, "3MiB"):
        check_split(rank, budget)
    dist.barrier()
    dist.destroy_process_group()


def check_split(rank: int, budget: float | str) -> None:
    """Split around the loss, alike on both ranks: gradients equal to unsplit DDP's to rounding; the budget is kept."""
    torch.manual_seed(0)
    module = Classifier()
    reference = DistributedDataParallel(copy.deepcopy(module))
    torch.manual_seed(1 + rank)
    args = (torch.randn(256, 32), torch.randint(2048, (256,)))
    reference(*args).backward()
    step = fxmem.compile(DistributedDataParallel(module), budget=budget, solve_s=0.3)
    for _ in range(3):
        module.zero_grad()
        step(*args).backward()
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    module.zero_grad()
    assert step.plan.program.fissions
    assert fxmem.measure(lambda: step(*args).backward()).peak_bytes <= step.plan.budget_bytes
    plans: list[object] = [None, None]
    dist.all_gather_object(plans, (step.plan.program.fissions, step.plan.actions))
    assert plans[0] == plans[1]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A process group of this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.distributed
def test_wrapped_modules_are_looked_for_once(alone, monkeypatch):
    """Later ones are heard of: a search goes through every object of the process."""
    gc.collect()
    before = compat.has_reducer()
    monkeypatch.setattr(gc, "get_objects", lambda: pytest.fail("searched again"))
    parallel = DistributedDataParallel(nn.Linear(2, 2))
    assert compat.has_reducer()
    del parallel
    gc.collect()
    assert compat.has_reducer() == before


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks():
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cases.test_ddp"],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(check_rank, (f"{folder}/store",), nprocs=2, start_method="spawn")
