"""`Program` from captured graphs: storages, effects, regions, and what may be recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxmem import compat
from fxmem.capture import JointGraph, capture
from fxmem.capture.joint import from_aot
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Op, Program
from tests import zoo


def program_of(function: Callable[..., Any], *args: Any) -> Program:
    (joint,) = capture(function, args)
    return program_from_joint(joint)


def ops_of(program: Program, target: str) -> list[Op]:
    return [op for op in program.ops if target in op.target]


def test_index_is_node_order_and_forward_comes_first() -> None:
    (joint,) = capture(*zoo.build("mlp"))
    program = program_from_joint(joint)
    assert [op.name for op in program.ops] == [node.name for node in joint.nodes]
    regions = [op.region for op in program.ops]
    assert regions == sorted(regions, reverse=True)
    assert [program.ops[i].name for i in program.static] == list(joint.static_inputs)
    assert len(program.forward_outputs) == joint.num_forward_outputs
    assert [program.ops[joint.num_forward_nodes].name] == list(joint.tangents)


def test_parameters_and_their_gradients_are_called_as_in_the_model() -> None:
    model, args = zoo.build("mlp")
    (joint,) = capture(model, args)
    program = program_from_joint(joint)
    labels = {op.label for op in program.ops if op.label}
    named = {name for name, _ in model.named_parameters()}
    others = {"argument 0", "argument 1", "gradient of output 0"}
    assert labels == named | {f"gradient of {name}" for name in named} | others


def test_ops_know_their_modules_in_forward_and_backward() -> None:
    model, args = zoo.build("mlp")
    (joint,) = capture(model, args)
    program = program_from_joint(joint)
    paths = {name for name, _ in model.named_modules()}
    assert {op.module for op in program.ops} <= paths
    for op in program.ops:
        if op.target == "aten.gelu.default" or op.target == "aten.gelu_backward.default":
            assert op.module.endswith(".2")
    regions = {op.region for op in program.ops if op.module == "blocks.1.1"}
    assert regions == {"forward", "backward"}
    assert Program.from_json(program.to_json()) == program


def test_views_share_a_storage_and_sizes_are_those_of_storages() -> None:
    def function(x: Tensor) -> Tensor:
        return (x[:, :1].expand(4, 6) * x.t().t()).sum()

    program = program_of(function, torch.ones(4, 6, requires_grad=True))
    x = program.ops[0]
    assert {op.storages for op in ops_of(program, "expand") if op.region == "forward"} == {x.storages}
    assert program.nbytes()[x.storages[0]] == 4 * 6 * 4
    expanded_tangent = ops_of(program, "expand")[-1]
    assert program.nbytes()[expanded_tangent.storages[0]] == 4, "an expanded scalar has four bytes"


def test_outputs_of_one_op() -> None:
    program = program_of(lambda x: F.layer_norm(x, (8,)).square().sum(), torch.ones(2, 8, requires_grad=True))
    (norm,) = ops_of(program, "native_layer_norm.default")
    assert [program.nbytes()[s] for s in norm.storages] == [64, 8, 8]
    getitems = [op for op in ops_of(program, "getitem") if norm.index in op.args]
    assert all(program.is_folded(op) for op in getitems)


def test_random_ops_are_known_by_their_tag() -> None:
    def function(x: Tensor) -> Tensor:
        return (F.dropout(x, 0.5) * torch.rand_like(x) + torch.bernoulli(x.detach().sigmoid())).sum()

    program = program_of(function, torch.ones(4, requires_grad=True))
    random = {op.target for op in program.ops if op.is_random}
    assert random == {"aten.native_dropout.default", "aten.rand_like.default", "aten.bernoulli.default"}
    assert not any(op.recomputable for op in program.ops if op.is_random), "a state takes more bytes than they do"


def test_a_random_op_is_recomputable_from_the_state_that_it_draws_from() -> None:
    program = program_of(lambda x: F.dropout(x, 0.5).square().sum(), torch.ones(64, 64, requires_grad=True))
    state, draw = [op for op in program.ops if op.is_random]
    assert (state.target, state.recomputable, state.args) == ("fxmem.rng_state.default", False, ())
    assert program.nbytes()[state.storages[0]] == torch.get_rng_state().numel()
    assert (draw.target, draw.recomputable, draw.args) == ("aten.native_dropout.default", True, (0, state.index))
    assert program.state_op(draw) == state
    assert program.states == {state.index}


def attention(dropout: float) -> Callable[[Tensor], Tensor]:
    return lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=dropout).square().sum()


def test_attention_draws_only_with_dropout() -> None:
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    (quiet,) = ops_of(program_of(attention(0.0), q), "flash_attention_for_cpu.default")
    assert not quiet.is_random
    assert quiet.recomputable
    assert any(op.is_random for op in program_of(attention(0.5), q).ops)


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("scale", torch.ones(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x) * self.scale.sin()
        self.scale.add_(1)
        return y.exp().sum()


def test_readers_of_overwritten_buffers() -> None:
    program = program_of(Overwriting(), torch.ones(2, 4, 8, 8, requires_grad=True))
    (norm,) = ops_of(program, "batch_norm_legit_functional")
    (sin,) = ops_of(program, "aten.sin")
    assert norm.recomputable, "it reads clones of the statistics"
    assert not sin.recomputable, "a clone would be as large as its result"
    clones = ops_of(program, "aten.clone")
    assert [program.nbytes()[op.storages[0]] for op in clones] == [16, 16]
    assert not any(op.recomputable for op in clones)
    written = {s for op in program.ops for s in op.mutates}
    assert written <= {program.ops[i].storages[0] for i in program.static}
    assert len(written) == 4
    assert all(op.region == "forward" for op in program.ops if op.mutates)


def late_reader() -> JointGraph:
    """y = x * scale; scale = 0; gradient of x = tangent * the old scale: as AOTAutograd would order it."""
    with compat.FakeTensorMode(), torch.no_grad():
        x, scale, tangent = torch.empty(4), torch.empty(4), torch.empty(4)

    def step(primals_1: Tensor, primals_2: Tensor, tangents_1: Tensor) -> list[Tensor | None]:
        y, zero = primals_1 * primals_2, primals_2 * 0
        gradient = tangents_1 * primals_2
        primals_2.copy_(zero)
        return [y, gradient, None]

    graph_module = make_fx(step)(x, scale, tangent)
    tags = {"mul": "is_forward", "mul_1": "is_forward", "mul_2": "is_backward", "copy_": "must_be_in_forward"}
    for node in graph_module.graph.nodes:
        node.name = {"primals_1_1": "x", "primals_2_1": "scale", "tangents_1_1": "tangents_1"}.get(node.name, node.name)
        node.meta["partitioner_tag"] = tags.get(node.name)
    return from_aot(graph_module, num_forward_outputs=1, static_indices=[1])


def test_what_backward_reads_of_an_overwritten_input_is_cloned() -> None:
    joint = late_reader()
    program = program_from_joint(joint)
    overwritten = {s for op in program.ops for s in op.mutates}
    assert overwritten == {program.ops[i].storages[0] for i in program.static}
    assert [op for op in program.ops if op.region == "backward" and overwritten & set(program.reads(op))] == []
    assert len(ops_of(program, "aten.clone")) == 1

    x, scale = torch.full((4,), 5.0), torch.full((4,), 3.0)
    y, gradient, _ = joint.graph_module(x, scale, torch.ones(4))
    assert (y.tolist(), gradient.tolist(), scale.tolist()) == ([15.0] * 4, [3.0] * 4, [0.0] * 4)


def test_outputs_that_are_inputs_and_empty_tensors() -> None:
    def function(x: Tensor, empty: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, torch.cat([x, empty]).sum(), empty * 2

    (joint,) = capture(function, (torch.ones(3, requires_grad=True), torch.ones(0)))
    program = program_from_joint(joint)
    assert 0 in program.nbytes()
    assert sum(program.nbytes()) > 0


def test_forward_only_needed_by_backward_is_still_forward() -> None:
    (joint,) = capture(lambda x: x.exp().sum(), (torch.ones(3, requires_grad=True),))
    program = program_from_joint(joint)
    assert isinstance(joint, JointGraph)
    (exp,) = ops_of(program, "aten.exp.default")
    assert exp.region == "forward"
    detached = [op for op in ops_of(program, "aten.detach") if op.region == "forward"]
    assert all(program.is_folded(op) for op in detached)


def test_views_whose_values_lost_their_base_get_it_back() -> None:
    """inductor's patterns leave expanded tensors that would seem to own as many bytes as they have elements."""
    with compat.FakeTensorMode() as mode, torch.no_grad():
        x = torch.empty(4, 1)

    def step(primals_1: Tensor) -> list[Tensor | None]:
        return [primals_1.expand(4, 1000).unsqueeze(0).sum(), None]

    graph_module = make_fx(step)(x)
    (node,) = (n for n in graph_module.graph.nodes if n.target is torch.ops.aten.expand.default)
    with mode:
        node.meta["val"] = torch.empty_strided((4, 1000), (1, 0))
    joint = from_aot(graph_module, num_forward_outputs=1)
    program = program_from_joint(joint)
    assert max(program.nbytes()) == 16
