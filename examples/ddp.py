"""Data parallel: `torchrun --nproc-per-node 2 examples/ddp.py`. DDP's buckets count against the budget."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxmem


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    step = fxmem.compile(model, budget=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        step(torch.randn(256, 32)).backward()
        optimizer.step()
    weights = [torch.empty(32, 128) for _ in range(dist.get_world_size())]
    dist.all_gather(weights, model.module.blocks[0][2].weight.detach().contiguous())
    assert all(torch.equal(weights[0], other) for other in weights)
    print(f"rank {dist.get_rank()}: {step.plans[0]!r}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
