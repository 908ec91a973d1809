"""The wrapper is the model: copies, pickles, hooks, signature, class, names; and the backend's steps and errors."""

import copy
import inspect
import io
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmem
from tests.models import Blocks, Net, blocks, gradients

QUICK = {"planner": "sqrt"}


def images():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 3, 16, 16), torch.randint(5, (8,)))


def run(step, args):
    step(*args).backward()


def same(left, right):
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_it_is_the_model():
    module, _ = blocks()
    step = fxmem.compile(module, 0.9)
    assert isinstance(step, Blocks)
    assert isinstance(step, fxmem.CompiledModule)
    assert type(step).__name__ == "Blocks"
    assert inspect.signature(step.forward) == inspect.signature(module.forward)
    assert inspect.signature(type(step).forward) == inspect.signature(Blocks.forward)
    assert list(step.state_dict()) == list(module.state_dict())
    assert repr(step) == repr(module)
    assert type(fxmem.compile(module)) is type(step)


def test_what_is_set_on_one_is_on_both():
    module, args = blocks()
    step = fxmem.compile(module)
    run(step, args)
    step.extra, module.other = 1, 2
    assert (module.extra, step.other) == (1, 2)
    step.scale = 2 * torch.ones(32)  # a buffer
    step.blocks[0] = nn.Identity()
    step.eval()
    assert not module.training
    step.train()
    module.zero_grad()
    run(step, args)
    found = gradients(module)
    run(module, args)
    assert same(found, gradients(module))
    del step.extra
    assert not hasattr(module, "extra")
    step.blocks = nn.ModuleList()
    assert not module.blocks


def test_own_attributes_by_the_steps_names_stay_the_models():
    class Named(Blocks):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.zeros(()))
            self.plan = "mine"

        def forward(self, x, y):
            self.step += 1
            return super().forward(x, y)

    module, (_, args) = Named(), blocks()
    with pytest.warns(UserWarning, match="plan, step"):
        step = fxmem.compile(module, 0.95, **QUICK)
    run(step, args)
    assert step.step == module.step == 1
    assert step.plan == "mine"
    assert fxmem.step_of(step).plan.budget_bytes
    step.set_budget(None)
    step.step = torch.tensor(5.0)
    run(step, args)
    assert module.step == 6
    assert fxmem.step_of(step).plan.budget_bytes is None


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_deep_copy_is_a_model_of_its_own(num_steps):
    module, args = images()
    loss_fn = nn.CrossEntropyLoss(weight=torch.rand(5))
    optimizer = torch.optim.Adam(module.parameters())
    step = fxmem.compile(module, 0.75, loss_fn=loss_fn, optimizer=optimizer)
    for _ in range(num_steps):
        run(step, args)
        optimizer.step()
        module.zero_grad()
    other = copy.deepcopy(step)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    reference = copy.deepcopy(other._fxmem.function)
    loss_fn(reference(args[0]), args[1]).backward()
    run(other, args)
    assert all(p.grad is None for p in module.parameters())
    assert same(gradients(other), gradients(reference))
    assert other.plan.budget_bytes < other.plan.baseline_peak_bytes
    mine = {id(p) for p in other.parameters()}
    made = fxmem.step_of(other).settings
    assert all(id(p) in mine for group in made.optimizer.param_groups for p in group["params"])
    assert not made.optimizer.state
    assert made.loss_fn is not loss_fn
    run(step, args)
    assert len(gradients(module)) == len(list(module.parameters()))
    assert not gradients(other)


def test_a_shallow_copy_shares_the_weights_but_not_the_step():
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    other = copy.copy(step)
    assert other.blocks is module.blocks
    other.extra = 1
    assert not hasattr(module, "extra")
    run(other, args)
    assert not step.plans


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [0, 1])
def test_pickled_and_loaded(num_steps):
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    for _ in range(num_steps):
        run(step, args)
        module.zero_grad()
    step.set_budget(0.9)
    file = io.BytesIO()
    torch.save(step, file)
    file.seek(0)
    for other in (pickle.loads(pickle.dumps(step)), torch.load(file, weights_only=False)):
        assert isinstance(other, Blocks)
        run(other, args)
        assert other.plan.budget_bytes == int(0.9 * other.plan.baseline_peak_bytes)
        run(module, args)
        assert same(gradients(other), gradients(module))


def test_a_function_copied_and_pickled():
    step = fxmem.compile(torch.nn.functional.gelu)
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        x = torch.randn(100, requires_grad=True)
        other(x).sum().backward()
        assert x.grad is not None
    assert not step.plans


def test_hooks_run_once_whoever_they_were_registered_on():
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    seen = []
    step.register_forward_pre_hook(lambda m, given: seen.append(("before", len(given))))
    module.register_forward_hook(lambda m, given, out: seen.append(("after", len(given))))
    step.register_full_backward_hook(lambda m, grad_in, grad_out: seen.append(("backward", len(grad_out))))
    run(step, (args[0].requires_grad_(), args[1]))
    assert seen == [("before", 2), ("after", 2), ("backward", 1)]
    step.forward(*args)
    assert len(seen) == 3


def test_with_a_loss_hooks_see_the_models_output():
    module, args = images()
    shapes = []
    module.register_forward_hook(lambda m, given, out: shapes.append((len(given), tuple(out.shape))))
    step = fxmem.compile(module, 0.75, loss_fn=F.cross_entropy)
    run(step, args)
    assert set(shapes) == {(1, (8, 5))}
    assert list(inspect.signature(step.forward).parameters) == ["args", "kwargs"]


def test_forward_in_place_of_the_wrappers():
    """As Accelerate's mixed precision does it: what was forward is called by what replaces it."""
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    before, calls = step.forward, []

    def forward(*given):
        calls.append(len(given))
        return before(*given)

    step.forward = forward
    run(step, args)
    assert calls == [2]
    assert step.plan.budget_bytes
    assert module.forward != forward
    del step.forward
    run(step, args)
    assert calls == [2]


def test_forward_replaced_on_the_model_is_planned_anew():
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    run(step, args)
    module.zero_grad()
    old = module.forward
    module.forward = lambda x, y: 3 * old(x, y)
    run(step, args)
    assert step.plan.budget_bytes
    found = gradients(module)
    run(module, args)
    assert same(found, gradients(module))


def test_compiled_again_it_is_the_model_that_is_compiled():
    module, args = blocks()
    step = fxmem.compile(fxmem.compile(module, 1000), 0.95, **QUICK)
    run(step, args)
    assert step.plan.budget_bytes > 1000
    assert not isinstance(step._fxmem.function, fxmem.CompiledModule)


def test_torch_compile_around_it_keeps_the_plan():
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    torch.compile(step, backend="eager")(*args).backward()
    assert step.plan.budget_bytes
    assert fxmem.step_of(step).measured_peak_bytes <= step.plan.budget_bytes


def test_swa_utils_average_it():
    module, args = blocks()
    step = fxmem.compile(module, 0.95, **QUICK)
    run(step, args)
    average = torch.optim.swa_utils.AveragedModel(step)
    average.update_parameters(step)
    with torch.no_grad():
        assert torch.equal(average(*args), module(*args))


@pytest.mark.parametrize("in_place", [False, True])
def test_torch_compiles_backend_has_a_step(in_place):
    module, args = blocks()
    options = {"budget": 0.9537 - 0.01 * in_place, **QUICK}  # calls with equal options share code, and so the step
    if in_place:
        module.compile(backend="fxmem", options=options)
    step = module if in_place else torch.compile(module, backend="fxmem", options=options)
    with pytest.raises(LookupError, match="first call"):
        fxmem.step_of(step)
    run(step, args)
    plan = fxmem.step_of(step).plan
    assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
    assert set(fxmem.step_of(step).parameters) == set(module.parameters())
    fxmem.step_of(step).set_budget(None)
    run(step, args)
    assert fxmem.step_of(step).plan.budget_bytes is None


def test_the_graphs_of_one_torch_compile_are_one_step():
    class Broken(Blocks):
        def forward(self, x, y):
            x = x + self.blocks[0](x)
            print(end="")
            return F.mse_loss(x + self.blocks[1](x), y)

    module, (_, args) = Broken(), blocks()
    step, other = (torch.compile(Broken(), backend="fxmem", options={"planner": name}) for name in ("sqrt", "full"))
    run(step, args)
    run(other, args)
    assert len(fxmem.step_of(step).plans) == len(fxmem.step_of(other).plans) == 2
    assert fxmem.step_of(step) is not fxmem.step_of(other)
    with pytest.raises(LookupError):
        fxmem.step_of(module)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"bugdet": 1}}, "unknown option 'bugdet' .did you mean 'budget'"),
        ({"options": {1: 2}}, "unknown option '1'"),
        ({"options": {"loss_fn": F.mse_loss}}, "use fxmem.compile"),
        ({"options": {"dynamic": True}}, "torch.compile's own"),
        ({"options": "budget"}, "must be a dict"),
        ({"mode": "max-autotune"}, "takes options="),
    ],
)
def test_bad_options_of_the_backend_show_as_themselves(given, message):
    module, args = blocks()
    step = torch.compile(module, backend="fxmem", **given)
    for _ in range(2):
        with pytest.raises(fxmem.OptionError, match=message) as caught:
            step(*args)
        assert "BackendCompilerFailed" not in f"{caught.type} {caught.value}"


def test_an_infeasible_budget_of_the_backend_shows_as_itself_and_can_be_mended():
    module, args = blocks()
    module.compile(backend="fxmem", options={"budget": 1000, **QUICK})
    with pytest.raises(fxmem.BudgetInfeasible, match="no plan fits 1000 B") as caught:
        module(*args)
    assert caught.value.at_peak
    fxmem.step_of(module).set_budget(caught.value.min_bytes)
    run(module, args)
    assert fxmem.step_of(module).plan.budget_bytes == caught.value.min_bytes


@pytest.mark.parametrize("budget", [0.6, "min"])
def test_layers_compiled_in_place_are_one_step(budget):
    """One budget for what one call of the model runs, not one each; another loop's models are another step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Residual() for _ in range(4))), torch.randn(1024, 32)
    expected = copy.deepcopy(model)
    for layer in model:
        layer.compile(backend="fxmem", options={"budget": budget, "solve_s": 0.06})
    for _ in range(4):
        model.zero_grad()
        peak = fxmem.measure(lambda: model(x).square().mean().backward()).peak_bytes
    step = fxmem.step_of(model[0])
    assert all(fxmem.step_of(layer) is step for layer in model)
    assert len(step.plans) == 4
    assert peak <= step.plan.budget_bytes
    assert abs(step.measured_peak_bytes - peak) <= 0.01 * peak
    unplanned = fxmem.measure(lambda: expected(x).square().mean().backward()).peak_bytes
    assert peak < (0.75 if budget == 0.6 else 0.5) * unplanned
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-8)
    other = nn.Linear(32, 8)
    other.compile(backend="fxmem", options={"budget": budget, "solve_s": 0.06})
    other(x).square().sum().backward()
    assert fxmem.step_of(other) is not step


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x):
        return x + self.inner(x)


TORCH_CLASSES = """
import torch
from torch import nn

def block():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

model = nn.Sequential(block(), block())
for inner in model:
    inner.compile(backend="fxmem", options={"budget": "min", "solve_s": 0.05})
x = torch.randn(512, 64)
for _ in range(2):
    model(x).square().mean().backward()

import fxmem
for inner in model:
    step = fxmem.step_of(inner)
    assert len(step.plans) == 2
    assert len(step.parameters) == 8
    for plan in step.plans:
        assert {op.module for op in plan.program.ops} >= {"0", "1", "2"}, plan
        assert not any(op.source for op in plan.program.ops)  # no line is the user's
assert not torch._dynamo.config.wrap_top_frame
"""


@pytest.mark.slow
def test_modules_of_torchs_own_classes_are_compiled_in_place():
    """Dynamo skips torch's frames: such a module would run without a plan, and nothing would say so."""
    subprocess.run([sys.executable, "-c", TORCH_CLASSES], check=True)
