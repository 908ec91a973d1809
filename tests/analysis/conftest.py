"""A small captured step, and a cache of its own for every test."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxmem.capture import JointGraph, capture


class ConvNet(nn.Module):
    """Embedding, convolution, dropout, loss: an op with a workspace, a random one, indices, views."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 7)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids).permute(0, 3, 1, 2)
        x = torch.dropout(torch.relu(self.norm(self.conv(x))), 0.1, True)
        return nn.functional.cross_entropy(self.head(x.flatten(2).mean(-1)), target)


def conv_net_inputs() -> tuple[Tensor, Tensor]:
    return torch.zeros(4, 12, 12, dtype=torch.long), torch.zeros(4, dtype=torch.long)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FXMEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def conv_net() -> tuple[ConvNet, JointGraph]:
    torch.manual_seed(0)
    model = ConvNet()
    (joint,) = capture(model, conv_net_inputs())
    return model, joint
