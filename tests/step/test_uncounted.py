"""Users hear of an optimizer's state that no budget counts."""

import pytest
import torch

import fxmem
from tests.models import blocks

ADAM = torch.optim.Adam


def train(caplog, make_optimizer, named=False, num_steps=3):
    module, args = blocks(num_blocks=2, batch=128)
    optimizer = make_optimizer(module.parameters())
    step = fxmem.compile(module, budget="1GiB", planner="none", optimizer=optimizer if named else None)
    for _ in range(num_steps):
        step(*args).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [r.getMessage() for r in caplog.records if "stands beside the budget" in r.getMessage()]


@pytest.fixture(autouse=True)
def _small_states_count(monkeypatch):
    monkeypatch.setattr("fxmem.step.uncounted._SHARE", 1e-4)


def test_a_state_that_no_budget_counts_is_said_once(caplog):
    (message,) = train(caplog, ADAM)
    assert message.startswith("the state of Adam, 131.55 KiB, stands beside the budget of 1.00 GiB")


@pytest.mark.parametrize(("make_optimizer", "named"), [(ADAM, True), (lambda ps: torch.optim.SGD(ps, lr=0.1), False)])
def test_nothing_is_said_of_one_that_counts_or_has_no_state(caplog, make_optimizer, named):
    assert train(caplog, make_optimizer, named) == []


def test_an_optimizer_of_other_parameters_says_nothing(caplog):
    other = torch.nn.Linear(512, 512)
    optimizer = ADAM(other.parameters())
    other(torch.randn(2, 512)).sum().backward()
    module, args = blocks(num_blocks=2, batch=128)
    fxmem.compile(module, budget="1GiB", planner="none")(*args).backward()
    optimizer.step()
    assert "stands beside" not in caplog.text
