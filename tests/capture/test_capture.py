"""Capture: what `torch.compile` hands over, what ahead-of-time capture foresees, and that both are the same graph."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fxmem import compat
from fxmem.capture import JointGraph, boxed, capture, make_backend
from fxmem.capture.ahead import first_break
from fxmem.capture.fakes import Fakes
from fxmem.capture.loss import with_loss
from fxmem.errors import BudgetInfeasible, CaptureError
from fxmem.ir.from_fx import program_from_joint
from tests import zoo

FAST_MODELS = ("mlp",)
SLOW_MODELS = tuple(name for name in zoo.NAMES if name not in FAST_MODELS)


def unplanned(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
    return compat.default_partition(joint.graph_module, joint.num_forward_outputs, joint.static_indices)


def compiled_with_graphs(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[JointGraph]]:
    """The callable compiled without a plan, and the list its graphs will appear in."""
    graphs: list[JointGraph] = []

    def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs.append(joint)
        return unplanned(joint)

    return compat.isolated_compile(function, make_backend(partition)), graphs


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def check_model(name: str) -> None:
    """Ahead-of-time graph == compiled graph; the compiled step gives eager's gradients and buffers."""
    module, args = zoo.build(name)
    eager = copy.deepcopy(module)
    (ahead,) = capture(module, args)
    step, graphs = compiled_with_graphs(module)
    torch.manual_seed(1)
    step(*args).backward()
    torch.manual_seed(1)
    eager(*args).backward()

    assert [g.fingerprint for g in graphs] == [ahead.fingerprint]
    assert program_from_joint(graphs[0]).fingerprint == program_from_joint(ahead).fingerprint
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    named = {id(tensors[name]) for name in ahead.names.values()}
    assert {id(p) for p in module.parameters()} <= named, "each parameter by one of its names"
    assert len(ahead.sources) > len(ahead.nodes) / 2
    torch.testing.assert_close(gradients(module), gradients(eager), rtol=1e-5, atol=1e-6)
    for (key, ours), theirs in zip(module.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=key)


@pytest.mark.parametrize("name", FAST_MODELS)
def test_model(name: str) -> None:
    check_model(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_MODELS)
def test_slow_model(name: str) -> None:
    check_model(name)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * self.count.sin()
        self.count.add_(1)
        return y.exp().sum()


X = torch.ones(3, 4)


def test_capture_of_meta_and_fake_tensors_is_the_graph_of_real_ones() -> None:
    (expected,) = capture(Small(), (X,))
    with torch.device("meta"):
        meta = Small()
    with compat.FakeTensorMode():
        fake, fake_x = Small(), torch.ones(3, 4)
        (within,) = capture(fake, (fake_x,))
    for joint in (*capture(meta, (X.to("meta"),)), *capture(meta, (X,)), within, *capture(fake, (fake_x,))):
        assert joint.fingerprint == expected.fingerprint


def test_capture_changes_nothing() -> None:
    module = Small().eval().train()
    before = {k: (id(v), v._version, v.clone()) for k, v in module.state_dict(keep_vars=True).items()}
    random_state = torch.get_rng_state()
    capture(module, (X,))
    with torch.no_grad():
        capture(module, (X,))
        assert not torch.is_grad_enabled()
    for key, value in module.state_dict(keep_vars=True).items():
        identity, version, data = before[key]
        assert (id(value), value._version) == (identity, version)
        torch.testing.assert_close(value, data, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in module.parameters())


def test_capture_leaves_later_compilations_static() -> None:
    module = Small()
    capture(module, (X,))
    capture(module, (torch.ones(5, 4),))
    step, graphs = compiled_with_graphs(module)
    step(X)
    assert graphs[0].fingerprint == capture(Small(), (X,))[0].fingerprint


def test_capture_allocates_less_than_one_activation() -> None:
    module, width = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3))), 256
    x = torch.empty(2**14, width)
    _, deltas = compat.cpu_memory_deltas(lambda: capture(lambda x: module(x).sum(), (x,)))
    assert max(deltas) < x.nbytes / 64


def test_symbolic_sizes() -> None:
    (joint,) = capture(Small(), (X,), dynamic=True)
    program = program_from_joint(joint)
    assert program.is_symbolic
    assert set(program.hints.values()) == {3}
    (static,) = capture(Small(), (torch.ones(7, 4),))
    (symbol,) = program.hints
    assert program.nbytes({symbol: 7}) == program_from_joint(static).nbytes()


def test_no_grad_gives_a_forward_only_graph() -> None:
    (joint,) = capture(Small(), (X,), train=False)
    assert not joint.has_backward
    assert {op.region for op in program_from_joint(joint).ops} == {"forward"}
    module = Small()
    eager = copy.deepcopy(module)
    step, graphs = compiled_with_graphs(module)
    with torch.no_grad():
        torch.testing.assert_close(step(X), eager(X))
    torch.testing.assert_close(module.state_dict(), eager.state_dict())
    assert graphs == []


def test_loss_fn_and_plain_functions() -> None:
    linear = nn.Linear(4, 2)
    (joint,) = capture(with_loss(linear, lambda y, factor: (factor * y).square().mean()), (X, 2.0))
    assert set(joint.names.values()) == {"weight", "bias"}
    (same,) = capture(lambda x: linear(x).square().mean(), (X,))
    assert sorted(same.names.values()) == sorted(joint.names.values())


@torch.compiler.disable
def not_traced() -> None:
    """A call that Dynamo breaks the graph at."""


class Broken(Small):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        not_traced()
        return self.norm(y).square().sum()


def test_graph_breaks_are_followed_on_fake_tensors() -> None:
    module = Broken()
    ahead = capture(module, (X,))
    step, graphs = compiled_with_graphs(module)
    step(X).backward()
    assert [g.fingerprint for g in ahead] == [g.fingerprint for g in graphs]
    assert len(ahead) == 2
    assert int(module.norm.num_batches_tracked) == 1, "only the compiled call ran"


def fails_on_shapes(x: Tensor) -> Tensor:
    return x.view(5, 5).sum()  # line named in the error


def fails_in_backward(x: Tensor) -> Tensor:
    y = x.requires_grad_().exp()  # line named in the error
    z = y * 2
    y.add_(1)
    return z.sum() + y.sum()


def needs_a_value(x: Tensor) -> Tensor:
    y = x.requires_grad_() * 2
    return y if y.sum().item() > 0 else -y  # line named in the error


@pytest.mark.parametrize("function", [fails_on_shapes, fails_in_backward, needs_a_value])
def test_errors_name_the_models_line(function: Callable[..., Any]) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(function, (X.clone(),))
    assert caught.value.source is not None
    assert "test_capture.py" in caught.value.source
    assert "# line named in the error" in caught.value.source


def breaks_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x.requires_grad_() * 2
        if x.sum().item() > 10:  # the second line that breaks it
            break
    return x.sum()


def test_the_first_graph_break_is_named_with_a_remedy() -> None:
    found = first_break(needs_a_value, (X.clone().requires_grad_(),))
    assert found is not None
    assert "Tensor.item()" in str(found)
    assert "leave it out of what is compiled" in str(found)
    assert found.source is not None
    assert "test_capture.py" in found.source
    assert first_break(Small(), (X,)) is None
    with pytest.raises(CaptureError, match="leave it out of what is compiled"):
        capture(breaks_in_a_loop, (X.clone(),))


def masked_rows(x: Tensor, mask: Tensor) -> Tensor:
    h = x.exp() * 2
    h[mask] = x.flatten().cos()
    return (h.sin() * h).sum()


def test_a_graph_whose_backward_has_sizes_that_depend_on_values_runs_as_under_torchs_backends() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(masked_rows(x, X > -9), x)
    step, graphs = compiled_with_graphs(masked_rows)
    (found,) = torch.autograd.grad(step(x, X > -9), x)
    torch.testing.assert_close(found, expected)
    assert graphs == []
    with pytest.raises(CaptureError, match="nonzero"):
        capture(masked_rows, (x, X > -9))


def masked_row(x: Tensor, mask: Tensor) -> Tensor:
    """As masked positions get one trained vector."""
    h = x.exp() * 2
    h[mask[:, 0]] = x[0]
    h[mask] = x[1, :1]
    h[:, 1:][mask[:, 1:]] = x[2, 3]
    return (checkpoint(masked_inside, h, mask, x, use_reentrant=False) * h).sum()


def masked_inside(h: Tensor, mask: Tensor, x: Tensor) -> Tensor:
    h = h.sin()
    h[~mask[:, 0]] = x[1:2]
    return h


def test_one_value_for_all_rows_of_a_mask_is_no_reason_to_break() -> None:
    x = torch.rand(3, 4, requires_grad=True)
    mask = torch.tensor([[True, False, True, False], [False, True, True, False], [False, False, False, True]])
    (expected,) = torch.autograd.grad(masked_row(x, mask), x)
    step, graphs = compiled_with_graphs(masked_row)
    (found,) = torch.autograd.grad(step(x, mask), x)
    torch.testing.assert_close(found, expected)
    assert len(graphs) == 1


def test_nothing_to_capture() -> None:
    with pytest.raises(CaptureError, match="nothing to capture"):
        capture(lambda x: 3, (X,))


def test_errors_of_the_partition_are_found_under_dynamos() -> None:
    def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
        raise BudgetInfeasible(1, 2)

    step = compat.isolated_compile(Small(), make_backend(partition))
    with pytest.raises(compat.BackendCompilerFailed) as caught:
        step(X)
    assert isinstance(caught.value.inner_exception, BudgetInfeasible)


@pytest.mark.parametrize("force_cache", [False, True])
def test_two_compilations_of_one_callable_never_share_code(force_cache: bool) -> None:
    calls: list[int] = []

    def partition_of(budget: int) -> Callable[[JointGraph], tuple[fx.GraphModule, fx.GraphModule]]:
        def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule]:
            calls.append(budget)
            return unplanned(joint)

        return partition

    def function(x: Tensor) -> Tensor:
        return x.exp().sum()

    x = X.clone().requires_grad_()
    budgets = list(range(10))  # more than Dynamo's recompile limit
    with compat.aot.functorch_config.patch(force_autograd_cache=force_cache):
        for budget in budgets:
            step = compat.isolated_compile(function, make_backend(partition_of(budget)))
            step(x).backward()
            step(x).backward()
    assert calls == budgets


def test_boxed_code_drops_arguments_at_their_last_use() -> None:
    alive: list[bool] = []
    reference: Callable[[], Tensor | None]

    def probe(y: Tensor) -> Tensor:
        alive.append(reference() is not None)
        return y

    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.neg, (x,))
    graph.output((graph.call_function(probe, (y,)),))
    run = boxed(fx.GraphModule(nn.Module(), graph))
    args = [torch.ones(3)]
    reference = weakref.ref(args[0])
    run(args)
    assert alive == [False]
    assert args == []


def test_no_frame_keeps_saved_tensors_alive_during_backward() -> None:
    """A chain of n exponentials: peak of the step is its n saved values, and falls to a few while backward runs."""
    num_ops, nbytes = 12, 4 * 2**18
    x = torch.zeros(2**18, requires_grad=True)

    def chain(x: Tensor) -> Tensor:
        for _ in range(num_ops):
            x = torch.tanh(x)
        return x.sum()

    step, _ = compiled_with_graphs(chain)
    step(x).backward()
    x.grad = None
    gc.collect()
    loss, forward = compat.cpu_memory_deltas(lambda: step(x))
    _, backward = compat.cpu_memory_deltas(loss.backward)
    assert sum(forward) >= num_ops * nbytes
    running, over_start = 0, []
    for delta in backward:
        running += delta
        over_start.append(running)
    assert max(over_start) <= 2.5 * nbytes, "a saved tensor dies when its op has run"
    assert over_start[-1] <= (1.5 - num_ops) * nbytes, "only the gradient is left"


def test_capture_without_dynamo() -> None:
    with torch.device("meta"):
        module, args = zoo.build("mlp")
    (joint,) = capture(module, args, frontend="aot")
    real, real_args = zoo.build("mlp")
    (expected,) = capture(real, real_args)
    assert op_targets(joint) == op_targets(expected)
    assert set(joint.names.values()) == set(dict(real.named_parameters()))
    assert any("zoo.py" in source for source in joint.sources.values())
    with pytest.raises(CaptureError, match=r"nn\.Module only"):
        capture(lambda x: x.sum(), (X,), frontend="aot")


def op_targets(joint: JointGraph) -> list[str]:
    return sorted(op.target for op in program_from_joint(joint).ops if not op.is_input)


def test_aliases_stay_aliases_under_fake_tensors() -> None:
    base = torch.zeros(4, 6)
    shared = nn.Linear(6, 6)
    module = nn.Sequential(shared, nn.Linear(6, 6))
    module[1].weight = shared.weight
    fakes = Fakes(module, ((base, base[1:], base.t()), {}), None)
    with fakes.installed() as ((whole, part, transposed), _):
        assert len({compat.storage_key(t) for t in (whole, part, transposed)}) == 1
        assert (part.storage_offset(), transposed.stride()) == (6, (1, 6))
        assert module[0].weight is module[1].weight
        assert isinstance(module[0].weight, compat.FakeTensor)
    assert module[0].weight is shared.weight
    assert not isinstance(shared.weight, compat.FakeTensor)
