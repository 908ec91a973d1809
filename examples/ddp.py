"""Data parallel: `torchrun --nproc-per-node 2 examples/ddp.py`. DDP's buckets count against the budget."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fxmem


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*blocks))
    step = fxmem.compile(model, budget=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        x = torch.randn(256, 32)
        optimizer.zero_grad()
        (step(x) - x).square().mean().backward()
        optimizer.step()
    weights = [torch.empty(32, 128) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module[0][2].weight.detach().contiguous())
    assert all(torch.equal(weights[0], other) for other in weights)
    print(f"rank {dist.get_rank()}: {step.plans[0]!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
