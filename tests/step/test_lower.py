"""Lowered modules: what crosses, in which order, and that steps are bit for bit those of the unplanned graph."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from planned import is_same, planned, train
from random_plans import full_plan, random_plan
from torch import nn

from fxmem import compat


class Small(nn.Module):
    """Views of one storage, batch statistics, dropout, a tied weight, a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.heads = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(self.norm(x)).split(8, dim=1)
        x = F.dropout(q.tanh() * k.sigmoid() + v, 0.3) + torch.tensor([0.5])
        return self.out(self.out(x).exp()).sigmoid().sum()


@pytest.fixture(scope="module")
def small() -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Small(), (torch.randn(6, 8),)


def test_random_plans_leave_losses_gradients_and_statistics_bit_for_bit(small) -> None:
    module, args = small
    unplanned = train(planned(module, full_plan).step, module, args)
    for seed in range(3):
        plan = planned(module, lambda program, seed=seed: random_plan(program, seed, keep=0.2))
        assert is_same(train(plan.step, module, args), unplanned)
        assert any(n.name.endswith("_remat") for n in plan.joints[0].nodes)


def test_steps_equal_eager(small) -> None:
    module, args = small
    module = copy.deepcopy(module).eval()  # without dropout: its mask depends on which op draws it
    seen, expected = train(planned(module, full_plan).step, module, args), train(module, module, args)
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_one_tensor_is_saved_for_each_storage_and_backward_takes_them_in_order(small) -> None:
    module, args = small
    plan = planned(module, full_plan)
    train(plan.step, module, args, num_steps=1)
    (lowered,) = plan.lowered
    output = lowered.forward.graph.output_node()
    saved = output.args[0][plan.joints[0].num_forward_outputs :]
    keys = [compat.storage_key(n.meta["val"]) for n in saved]
    assert len(keys) == len(set(keys))
    placeholders = [n.name for n in lowered.backward.graph.find_nodes(op="placeholder")]
    assert placeholders[: len(lowered.saved)] == list(lowered.saved) == [n.name for n in saved]
    assert all(n.users for n in lowered.backward.graph.find_nodes(op="placeholder"))


def test_sizes_cross_as_numbers_and_one_compilation_serves_all_batches() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Flatten(0), nn.Softmax(0))

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x).pow(2).sum() / x.shape[0]

    loss = Loss()
    plan = planned(loss, lambda program: random_plan(program, 1, keep=0.0), dynamic=True)
    for batch in (4, 6, 9):
        x = torch.randn(batch, 8)
        assert [a.shape for a in train(plan.step, loss, (x,), 1)] == [b.shape for b in train(loss, loss, (x,), 1)]
        for one, other in zip(train(plan.step, loss, (x,), 1), train(loss, loss, (x,), 1), strict=True):
            torch.testing.assert_close(one, other)
    assert len(plan.joints) == 1
    assert plan.lowered[0].saved_sizes


def test_a_second_backward_through_a_retained_graph_gives_the_same_gradients(small) -> None:
    module, args = small
    module.zero_grad()
    step = planned(module, lambda program: random_plan(program, 2, keep=0.2)).step
    state = copy.deepcopy(module.state_dict())
    loss = step(*args)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    loss.backward()
    assert is_same([p.grad for p in module.parameters()], first)
    module.load_state_dict(state)
    module.zero_grad()


@pytest.mark.slow
def test_inductor_compiles_what_the_plan_chose(small, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    module, args = small
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        unplanned = train(planned(module, full_plan, inner="inductor").step, module, args, num_steps=1)
        plan = planned(module, lambda program: random_plan(program, 0, keep=0.2), inner="inductor")
        assert is_same(train(plan.step, module, args, num_steps=1), unplanned)
    assert any(n.name.endswith("_remat") for n in plan.lowered[0].backward.graph.nodes)
