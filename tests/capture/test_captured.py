"""Kinds of models that capture once refused: each is planned under a budget and gives eager mode's gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan  # noqa: TID251
from torch._higher_order_ops.while_loop import while_loop  # noqa: TID251

import fxmem
from fxmem.capture import capture
from fxmem.ir.from_fx import program_from_joint

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo

SIZE = 32


class Model(nn.Module):
    """`function(weight, x)` with a square weight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE) / SIZE)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.weight, x)


def step_of(function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """Outputs and gradients (dense) of one step; the first output is the loss."""
    outputs = function(*args)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs[0].backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return [*(t.detach() for t in outputs), *(g.to_dense() for g in gradients)]


def check_steps(module: nn.Module, args: tuple[Any, ...], budget: Any = "min") -> fxmem.api.CompiledModule:
    """Two steps under `budget` are eager mode's, in one graph, and the measured peak is what was predicted."""
    expected = step_of(module, module, args)
    compiled = fxmem.compile(copy.deepcopy(module), budget=budget, solve_s=0.2)
    for _ in range(2):
        found = step_of(compiled, compiled, args)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len(compiled.plans) == 1
    assert compiled.num_retries == 0
    return compiled


class SavesItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y


class EditsItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.add_(1)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def edited_then_returned(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    h = x * 2 * w
    h += 1
    return h.square().mean(), h.detach()


def returns(function: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def body(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = function.apply(x * w * 2)
        return y.sum(), y.detach()

    return body


def branches(w: Tensor, x: Tensor) -> Tensor:
    for _ in range(3):
        h = x @ w
        chosen = torch.cond(h.sum() > 0, lambda h: (h.sin() * 2).exp(), lambda h: h.cos(), (h,))
        x = (chosen * h.tanh()).sin()
    return x.sum()


def scanned(w: Tensor, x: Tensor) -> Tensor:
    def combine(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        following = (carry * w[0] + row).tanh()
        return following, following.clone()

    last, rows = scan(combine, torch.zeros(SIZE), x)
    return rows.sum() + last.sum()


def looped(w: Tensor, x: Tensor) -> Tensor:
    h = x @ w
    start = (torch.zeros((), dtype=torch.int64), h.detach())
    _, looped = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), start)
    return (h * looped).sum()


def checked(w: Tensor, x: Tensor) -> Tensor:
    return ((x * w).exp() * F.one_hot(x.long() % SIZE, SIZE).sum(0)).sum()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "edited, then returned": edited_then_returned,
    "custom function that saves its output": returns(SavesItsOutput),
    "custom function that edits its input": returns(EditsItsInput),
    "cond": branches,
    "scan": scanned,
    "one_hot": checked,
    "complex": lambda w, x: (torch.fft.ifft(torch.fft.fft(x) * torch.complex(w, w)).abs() ** 2).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    check_steps(Model(FUNCTIONS[name]), (torch.rand(SIZE, SIZE),))


def test_a_branch_without_effects_runs_again() -> None:
    step = check_steps(Model(branches), (torch.rand(SIZE, SIZE),))
    names = [node.name for node in step.plan.graph_module.graph.nodes]
    assert any(name.startswith("cond") and "remat" in name for name in names)


def test_a_branch_with_effects_does_not() -> None:
    def drops(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        return torch.cond(h.sum() > 0, lambda h: F.dropout(h, 0.5), lambda h: h.cos(), (h,)).sum()

    (joint,) = capture(Model(drops), (torch.rand(SIZE, SIZE),))
    (cond, _) = [op for op in program_from_joint(joint).ops if op.target == "cond"]
    assert not cond.recomputable


def test_while_loop() -> None:
    """Its length depends on values, so nothing is known of what it allocates: the first step corrects the plan."""
    module, args = Model(looped), (torch.rand(SIZE, SIZE),)
    expected = step_of(module, module, args)
    torch.testing.assert_close(step_of(fxmem.compile(module, budget=1.0), module, args), expected)


def test_what_is_returned_detached_belongs_to_forward() -> None:
    (joint,) = capture(Model(edited_then_returned), (torch.rand(SIZE, SIZE),))
    forward = joint.nodes[: joint.num_forward_nodes]
    assert set(joint.outputs[: joint.num_forward_outputs]) <= set(forward)


class Sparse(nn.Module):
    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag]) -> None:
        super().__init__()
        self.embed = kind(256, SIZE, sparse=True)
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, indices: Tensor) -> Tensor:
        return self.linear(self.embed(indices)).tanh().square().sum()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients(kind: Any) -> None:
    module, args = Sparse(kind), (torch.randint(256, (8, 4)),)
    check_steps(module, args)
    step = fxmem.compile(module, budget="min", solve_s=0.2)
    for _ in range(2):  # also on top of gradients that exist
        step(*args).backward()
    assert module.embed.weight.grad.is_sparse


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_arguments_are_refused_by_name() -> None:
    matrix, x = torch.eye(SIZE).to_sparse_csr(), torch.rand(SIZE, SIZE, requires_grad=True)
    step = fxmem.compile(lambda matrix, x: (matrix @ x).square().sum(), budget="min")
    with pytest.raises(fxmem.CaptureError, match=r"sparse Tensor[\s\S]*test_captured.py"):
        step(matrix, x)


def test_the_gradient_of_a_view_of_an_input_is_a_tensor_of_its_own() -> None:
    """Torch traces it as the view that the output is."""
    x = torch.rand(1, SIZE, requires_grad=True)
    for joint in capture(lambda x: x.unbind(-1)[0], (x,)):
        program = program_from_joint(joint)
        inputs = [op.storages for op in program.ops if op.is_input]
        assert len(set(inputs)) == len(inputs) == 2
    step = fxmem.compile(lambda x: x.unbind(-1)[0], budget="min")
    for _ in range(2):  # the second plan is that of the step
        step(x).sum().backward()
    assert step.plan.peak_bytes <= step.plan.budget_bytes


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers = kind(SIZE, SIZE, num_layers=2, batch_first=True)
        self.head = nn.Linear(SIZE, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers(kind: Any) -> None:
    check_steps(Recurrent(kind), (torch.rand(64, 4, SIZE),), budget=0.9)
