"""Stages run one after another in this process compute what the whole graph does."""

from typing import Any

import pytest
import torch
from torch import fx, nn

from fxmem.capture import JointGraph, capture
from fxmem.errors import OptionError
from fxmem.passes.base import run_passes
from fxmem.passes.split_backward import split_backward
from fxmem.passes.stage_split import CutError, StageGraph, StageSplit, split_stages
from fxmem.step.lower import lower
from tests.zoo import build


def even_cuts(joint: JointGraph, num_stages: int) -> list[int]:
    ops = [i for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
    return [ops[len(ops) * k // num_stages] for k in range(1, num_stages)]


def run_stages(stages: tuple[StageGraph, ...], values: dict[str, Any], split: bool) -> tuple[Any, dict[str, Any]]:
    """Loss, and gradient by name of the parameter."""
    messages: dict[str, Any] = {}
    saved, grads = [], {}
    for stage in stages:
        code = lower(stage.joint)
        inputs = [values[n] for n in (*stage.statics, *stage.data)] + [messages[n] for n in stage.receives]
        results = list(code.forward(*inputs))
        saved.append((stage, code, results[stage.joint.num_forward_outputs :]))
        messages = dict(zip(stage.sends, results, strict=False))
    loss = results[0]
    messages = {}
    for stage, code, kept in reversed(saved):
        tangents = [torch.ones_like(loss)] if stage.is_last else [messages[n] for n in stage.grad_receives]
        found = run_backward(stage, code.backward, [*kept, *tangents], split)
        messages = dict(zip(stage.grad_sends, found, strict=False))
        for name, grad in zip(stage.gradients, found[len(stage.grad_sends) :], strict=True):
            name = stage.joint.names[name]
            grads[name] = grads[name] + grad if name in grads else grad
    return loss, grads


def run_backward(stage: StageGraph, backward: fx.GraphModule, inputs: list[Any], split: bool) -> list[Any]:
    if not split:
        return list(backward(*inputs))
    parts, num_sends = split_backward(backward, len(stage.grad_sends)), len(stage.grad_sends)
    first = list(parts.inputs(*inputs))
    after = num_sends + len(parts.early)
    late = parts.weights(*(inputs[i] for i in parts.held), *first[after:])
    grads = dict(zip(parts.early, first[num_sends:after], strict=True)) | dict(zip(parts.late, late, strict=True))
    return first[:num_sends] + [grads[i] for i in range(len(stage.gradients))]


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["mlp", "unet", "gpt2_dropout"])
def test_stages_compute_what_the_model_does(name: str, split: bool) -> None:
    """Skips over stages, masks, tied weights; random ops are drawn once, in the same order."""
    model, args = build(name)
    (joint,) = capture(model, args, frontend="aot")
    stages = split_stages(joint, even_cuts(joint, 4))
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    values = {n: named[joint.names[n]].detach() for n in joint.static_inputs}
    data = [n.name for n in joint.nodes[: joint.num_forward_nodes] if n.op == "placeholder" and n.name not in values]
    values |= dict(zip(data, args, strict=True))
    torch.manual_seed(0)
    loss, grads = run_stages(stages, values, split)
    torch.manual_seed(0)
    expected = model(*args)
    expected.backward()
    assert loss.equal(expected.detach())
    found: dict[int, Any] = {}
    for key, grad in grads.items():
        found[id(named[key])] = found.get(id(named[key]), 0) + grad
    for parameter in model.parameters():
        torch.testing.assert_close(found[id(parameter)], parameter.grad)


def test_boundaries_stand_between_the_stages_and_the_graph_still_computes_the_same() -> None:
    model, args = build("mlp")
    (joint,) = capture(model, args, frontend="aot")
    staged = run_passes(joint, [StageSplit(tuple(even_cuts(joint, 3)))]).joint
    marks = [n.args for n in staged.nodes if n.target is torch.ops.fxmem.stage_boundary.default]
    assert marks == [(0, 1), (1, 2), (2, 1), (1, 0)]


def test_masks_are_made_where_they_are_read() -> None:
    """In GPT-2, what crosses a cut after a block is its output alone: no mask, no positions."""
    model, args = build("gpt2")
    (joint,) = capture(model, args, frontend="aot")
    block_end = next(i for i, n in enumerate(joint.nodes) if str(n.target) == "aten.native_layer_norm.default")
    stages = split_stages(joint, [block_end])
    assert len(stages[0].sends) == len(stages[1].grad_sends) == 1
    assert not set(stages[0].gradients) - set(stages[0].statics)


class TwoUses(nn.Module):
    """One BatchNorm, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.between = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.between(self.norm(x))).square().mean()


def test_a_buffer_that_two_stages_would_write_is_named() -> None:
    (joint,) = capture(TwoUses(), (torch.randn(8, 4),), frontend="aot")
    cut = next(i for i, n in enumerate(joint.nodes) if "addmm" in n.name)
    with pytest.raises(CutError, match=r"norm\.running"):
        split_stages(joint, [cut])


@pytest.mark.parametrize("cuts", [[0], [10**6], [40, 30]])
def test_cuts_that_make_no_sense(cuts: list[int]) -> None:
    model, args = build("mlp")
    (joint,) = capture(model, args, frontend="aot")
    with pytest.raises(OptionError, match="cuts must be"):
        split_stages(joint, cuts)
