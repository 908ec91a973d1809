"""A pipeline of two stages, cut and planned under a budget: `torchrun --nproc-per-node 2 examples/pipeline.py`."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxmem


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, target)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, x, target = Model(), torch.randn(1024, 32), torch.randn(1024, 32)
    pipe = fxmem.pipeline(model, (x, target), 0.9, num_stages=2, num_microbatches=4, schedule="1f1b-n")
    stage = pipe.stage(rank)
    schedule = pipe.schedule(stage)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        schedule.step(x, target)
        optimizer.step()
    optimizer.zero_grad()
    measured = fxmem.measure(lambda: schedule.step(x, target)).peak_bytes
    print(f"rank {rank}: predicted {pipe.plan.peak_bytes[rank]} bytes, measured {measured}")
    assert measured <= pipe.plan.budget_bytes
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
