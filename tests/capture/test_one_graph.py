"""What used to break the graph, or to be refused, and no longer does: compiled and ahead of time it is one graph."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.capture import JointGraph, capture, make_backend

LOGGER = logging.getLogger("tests.model")
ADAPTER = logging.LoggerAdapter(LOGGER, {})


def num_graphs(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """(ahead of time, compiled)"""
    graphs: list[JointGraph] = []

    def unplanned(joint: JointGraph) -> Any:
        graphs.append(joint)
        return compat.default_partition(joint.graph_module, joint.num_forward_outputs, joint.static_indices)

    ahead = capture(function, args, kwargs)
    compat.isolated_compile(function, make_backend(unplanned))(*args, **kwargs)
    return len(ahead), len(graphs)


def says_if_enabled(shape: Any) -> None:
    if LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug(shape)


SAYINGS: dict[str, Callable[[Any], None]] = {
    "logger": lambda shape: LOGGER.info("shape %s", shape),
    "if enabled": says_if_enabled,
    "adapter": lambda shape: ADAPTER.warning(f"shape {shape}"),
    "root": lambda shape: logging.debug(shape),
    "warning": lambda shape: warnings.warn("old", DeprecationWarning, stacklevel=2),
}


@pytest.mark.parametrize("name", SAYINGS)
@pytest.mark.filterwarnings("error")
def test_logging_does_not_break_the_graph(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            SAYINGS[name](y.shape)
            return self.linear(y).sum()

    assert num_graphs(Model(), (torch.ones(2, 4),), {}) == (1, 1)


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
TEXT = {**SIZES, "vocab_size": 64}
LABELLED: dict[str, Callable[[Any], tuple[nn.Module, dict[str, Tensor]]]] = {
    "gpt2": lambda hf: (
        hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)),
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.zeros(2, 8, dtype=torch.int64)},
    ),
    "bert": lambda hf: (
        hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3)),
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.zeros(2, dtype=torch.int64)},
    ),
    "vit": lambda hf: (
        hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=3)),
        {"pixel_values": torch.ones(2, 3, 32, 32), "labels": torch.zeros(2, dtype=torch.int64)},
    ),
    "llama": lambda hf: (
        hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT)),
        {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "labels": torch.zeros(2, 8, dtype=torch.int64)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LABELLED)
def test_transformers_with_labels_are_one_graph(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, kwargs = LABELLED[name](transformers)
    assert num_graphs(model, (), kwargs) == (1, 1)
