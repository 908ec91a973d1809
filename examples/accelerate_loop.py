"""Accelerate: compile the model in place, then prepare it as ever. Needs `pip install accelerate`."""

import torch
from accelerate import Accelerator
from torch import nn

import fxmem


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    model.compile(backend="fxmem", options={"budget": 0.9})
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(1024, 32)), batch_size=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for (x,) in data:
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    step = fxmem.step_of(model)
    print(repr(step.plan))
    print(f"losses {losses}")
    assert step.measured_peak_bytes <= step.budget_bytes


if __name__ == "__main__":
    main()
