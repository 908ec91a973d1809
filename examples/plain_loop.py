"""A loop of your own: training under a budget, evaluation in between, a checkpoint, and going on from it."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxmem

BUDGET = 0.7  # of what the first step needs without a plan; or "6GiB"


class Classifier(nn.Module):
    def __init__(self, width: int = 64, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), labels)


def batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(512, 64, generator=generator), torch.randint(10, (512,), generator=generator))
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_epochs: int) -> list[float]:
    """Losses on held-out batches, one an epoch."""
    held_out = []
    for epoch in range(num_epochs):
        model.train()
        for x, labels in batches(epoch, 3):
            optimizer.zero_grad()
            model(x, labels).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            held_out.append(sum(float(model(x, labels)) for x, labels in batches(100, 2)))
    return held_out


def main() -> None:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = fxmem.compile(model, budget=BUDGET, optimizer=optimizer)
    losses = train(step, optimizer, num_epochs=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        torch.save({"model": step.state_dict(), "optimizer": optimizer.state_dict()}, path)
        again = Classifier()
        saved = torch.load(path)
        again.load_state_dict(saved["model"])  # keys are the model's own: a checkpoint needs no fxmem
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-3)
        optimizer.load_state_dict(saved["optimizer"])
    losses += train(fxmem.compile(again, budget=BUDGET, optimizer=optimizer), optimizer, num_epochs=1)
    state = fxmem.step_of(step)
    print(repr(state.plan))
    print(f"measured {state.measured_peak_bytes} bytes of {state.budget_bytes}; losses {losses}")
    assert state.measured_peak_bytes <= state.budget_bytes
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
