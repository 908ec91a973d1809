"""Small models that several tests share."""

import torch
import torch.nn.functional as F
from torch import nn


class Blocks(nn.Module):
    """Residual blocks of norm, linear, GELU, linear (and dropout), and a mean-square loss."""

    def __init__(self, num_blocks: int = 4, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(dropout),
            )
            for _ in range(num_blocks)
        )
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x * self.scale, y)


class Net(nn.Module):
    """Convolutions with BatchNorm; returns logits (the loss is given apart)."""

    def __init__(self, num_layers: int = 4, width: int = 8) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(num_layers):
            layers += [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(width, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


def blocks(batch: int = 256, seed: int = 0, **options: float) -> tuple[Blocks, tuple[torch.Tensor, ...]]:
    """(module, args), the same at every call."""
    torch.manual_seed(seed)
    module = Blocks(**options)  # type: ignore[arg-type]
    return module, (torch.randn(batch, 32), torch.randn(batch, 32))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Copies of the gradients; they are dropped from the module."""
    found = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return found
