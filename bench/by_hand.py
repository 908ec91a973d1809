"""A cross entropy over tokens split in the model's own code, as people write it: rows of hidden states, one run of the
head after the other."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxmem.testing import zoo

NUM_PARTS = 8


class ChunkedLoss(nn.Module):
    """The loss of `whole`, a `zoo.LanguageModelLoss` or `zoo.TokenLoss`, whose modules it shares, in `num_parts`."""

    def __init__(self, whole: zoo.LanguageModelLoss | zoo.TokenLoss, num_parts: int = NUM_PARTS) -> None:
        super().__init__()
        model: Any = whole.model
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters stay in it
        self.num_parts = num_parts
        self.is_causal = isinstance(whole, zoo.LanguageModelLoss)
        self.options = {"use_cache": False} if self.is_causal else {}

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.model.base_model(input_ids=ids, **self.options).last_hidden_state
        if self.is_causal:
            hidden, labels = hidden[:, :-1], ids[:, 1:]
        assert labels is not None
        rows, wanted = hidden.flatten(0, 1), labels.flatten()
        pairs = zip(rows.chunk(self.num_parts), wanted.chunk(self.num_parts), strict=True)
        losses = [F.cross_entropy(self._head(part), own, reduction="sum") for part, own in pairs]
        return torch.stack(losses).sum() / wanted.numel()

    def _head(self, hidden: Tensor) -> Tensor:
        head = self.model.cls if hasattr(self.model, "cls") else self.model.get_output_embeddings()
        scores: Tensor = head(hidden)
        return scores


def split_by_hand(module: nn.Module) -> nn.Module | None:
    """`module` with its loss in parts; None where that is no cross entropy over tokens."""
    return ChunkedLoss(module) if isinstance(module, (zoo.LanguageModelLoss, zoo.TokenLoss)) else None
