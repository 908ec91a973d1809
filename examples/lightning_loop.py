"""Lightning: the part that computes is planned, the LightningModule stays as it is. Needs `pip install lightning`."""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxmem


class Body(nn.Module):
    """What computes, the loss included: then all of the step is planned."""

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


class Training(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = fxmem.compile(Body(), budget=0.7)  # not self: Lightning calls training_step, not forward
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.body(*batch)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    training = Training()
    trainer = lightning.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(training, DataLoader(data, batch_size=256))
    state = fxmem.step_of(training.body)
    print(repr(state.plan))
    print(f"measured {state.measured_peak_bytes} bytes of {state.budget_bytes}; losses {training.losses}")
    assert state.measured_peak_bytes <= state.budget_bytes
    assert training.losses[-1] < training.losses[0]


if __name__ == "__main__":
    main()
