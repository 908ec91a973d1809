"""Planned models under DistributedDataParallel: pytorch#104674, #108966."""

import copy
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
from torch.nn.parallel import DistributedDataParallel

import fxmem
from tests.models import blocks

ROOT = Path(__file__).parents[2]


def check_rank(rank: int, store: str) -> None:
    """Gradients of three steps equal to unplanned DDP's, another batch on each rank; the budget is kept."""
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
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks():
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.cases.test_ddp"],
        cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(check_rank, (f"{folder}/store",), nprocs=2, start_method="spawn")
