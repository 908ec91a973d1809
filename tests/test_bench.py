"""What benches compare fxmem with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.by_hand import split_by_hand
from bench.common import gradients, relative_error
from fxmem import compat
from fxmem.testing import zoo


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_loss_split_by_hand_is_the_same_loss(name: str) -> None:
    module, args = zoo.build(name)
    by_hand = split_by_hand(module)
    assert by_hand is not None
    assert relative_error(gradients(module, by_hand, args), gradients(module, module, args)) < 1e-5
    torch.testing.assert_close(by_hand(*args), module(*args))


def test_only_losses_over_tokens_are_split_by_hand() -> None:
    assert split_by_hand(zoo.build("mlp")[0]) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.parametrize(("num_classes", "outcome"), [(16384, "chunked"), (16, "no amplifier node")])
def test_inductors_own_splitting_says_what_it_did(num_classes: int, outcome: str) -> None:
    head, x = torch.nn.Linear(16, num_classes, bias=False), torch.randn(256, 16)
    labels = torch.randint(num_classes, (256,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(head(x).float(), labels)

    with compat.auto_chunking() as outcomes:
        torch.compile(loss)(x).backward()
    if "this torch" in outcomes[0]:
        pytest.skip(outcomes[0])
    assert any(outcome in text for text in outcomes)
