"""Emission: the rewritten graph is the schedule, and keeps what the captured one computed."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import full_plan, random_plan
from torch import nn

from fxmem import compat
from fxmem.capture import JointGraph, capture
from fxmem.capture.notes import META
from fxmem.errors import PlanMismatch, VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.passes import Emitter, emit, emits, region_of, rewrite
from fxmem.schedule.actions import Compute, Recompute, StartBackward
from fxmem.schedule.simulate import simulate


class Zoo(nn.Module):
    """Convolution, batch statistics, dropout, attention over split heads, a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.heads = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu().flatten(2).transpose(1, 2)
        q, k, v = self.heads(x).split(8, dim=2)
        x = F.layer_norm(x + F.scaled_dot_product_attention(q, k, v), (8,))
        x = self.out(F.dropout(self.out(x).tanh(), 0.5))
        return x.sigmoid().pow(2).mean()


@pytest.fixture(scope="module")
def captured() -> tuple[JointGraph, Program]:
    (joint,) = capture(Zoo(), (torch.randn(2, 3, 4, 4),))
    return joint, program_from_joint(joint)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), keep=st.floats(0, 1), linger=st.floats(0, 1))
def test_node_order_simulates_to_the_peak_of_the_plan(captured, seed: int, keep: float, linger: float) -> None:
    joint, program = captured
    actions = random_plan(program, seed, keep, linger)
    rewritten = rewrite(joint, program, actions)
    again = program_from_joint(rewritten)
    assert simulate(again, full_plan(again)).peak_bytes == simulate(program, actions).peak_bytes


def test_recomputed_ops_are_those_of_the_plan_and_run_once_more_each(captured) -> None:
    joint, program = captured
    actions = random_plan(program, seed=3, keep=0.2)
    rewritten = rewrite(joint, program, actions)
    expected = Counter(program.ops[a.op].name for a in actions if isinstance(a, Recompute))
    found = Counter(n.meta[META]["recompute_of"] for n in rewritten.nodes if "recompute_of" in n.meta[META])
    assert found == expected
    assert sum(expected.values()) > 5
    for node in rewritten.nodes:
        if "recompute_of" in node.meta[META]:
            assert node.name.startswith(node.meta[META]["recompute_of"] + "_remat")
            assert node.meta["stack_trace"]
            assert rewritten.sources[node.name]


def test_values_recomputed_do_not_look_like_aliases_of_their_first_run(captured) -> None:
    joint, program = captured
    rewritten = rewrite(joint, program, random_plan(program, seed=3, keep=0.0))
    by_name = {n.name: n for n in rewritten.nodes}
    pairs = [(n, by_name[n.meta[META]["recompute_of"]]) for n in rewritten.nodes if "recompute_of" in n.meta[META]]
    single = [(a, b) for a, b in pairs if isinstance(a.meta["val"], torch.Tensor)]
    assert single
    for again, first in single:
        assert compat.storage_key(again.meta["val"]) != compat.storage_key(first.meta["val"])
        assert again.meta["val"].shape == first.meta["val"].shape
        assert again.meta["val"].stride() == first.meta["val"].stride()


def test_random_and_mutating_ops_run_once_in_their_region(captured) -> None:
    joint, program = captured
    rewritten = rewrite(joint, program, random_plan(program, seed=5, keep=0.0))
    names = Counter(str(n.target) for n in rewritten.nodes)
    assert names["aten.native_dropout.default"] + names["aten.bernoulli.p"] + names["aten.bernoulli_.float"] == 1
    updates = [n for n in rewritten.nodes if str(n.target) == "aten.copy_.default"]
    assert len(updates) == sum(str(n.target) == "aten.copy_.default" for n in joint.nodes)
    assert all(region_of(n) == "forward" for n in updates)


def test_getitems_follow_their_op_at_once_so_that_the_tuple_dies(captured) -> None:
    joint, program = captured
    rewritten = rewrite(joint, program, random_plan(program, seed=1))
    nodes = rewritten.nodes
    tuples = [n for n in nodes if isinstance(n.meta.get("val"), (tuple, list)) and "split" not in n.name]
    assert tuples
    for node in tuples:
        following = nodes[nodes.index(node) + 1 :][: len(node.users)]
        assert set(following) == set(node.users)


def test_views_are_made_again_in_backward_so_that_nothing_but_bases_crosses(captured) -> None:
    joint, program = captured
    rewritten = rewrite(joint, program, full_plan(program))
    forward = set(rewritten.nodes[: rewritten.num_forward_nodes])
    crossing = {a for n in rewritten.nodes if n not in forward for a in n.all_input_nodes} & forward
    keys = [compat.storage_key(n.meta["val"]) for n in crossing if isinstance(n.meta["val"], torch.Tensor)]
    assert len(keys) == len(set(keys))


def test_graph_and_program_must_agree(captured) -> None:
    _, program = captured
    (other,) = capture(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), (torch.randn(2, 3),))
    with pytest.raises(PlanMismatch, match="nodes"):
        emit(other, program, full_plan(program))


@dataclass(frozen=True)
class Copy:
    """An action of this test: from here on `storage` is read from a copy."""

    storage: int


def test_an_action_without_a_handler_is_an_error_and_one_with_a_handler_is_emitted(captured) -> None:
    joint, program = captured
    tanh = next(op for op in program.ops if op.target == "aten.tanh.default")
    actions = [*full_plan(program)]
    actions.insert(actions.index(StartBackward()), Copy(program.allocates(tanh)[0]))
    with pytest.raises(VerifyError, match="no pass emits Copy"):
        emit(joint, program, actions)

    @emits(Copy)
    def handler(emitter: Emitter, action: Copy) -> None:
        node = emitter.current(action.storage)
        clone = emitter.call(torch.ops.aten.clone.default, (node,), "copied", emitter.fresh_like(node))
        emitter.rebind(action.storage, clone)

    rewritten = emit(joint, program, actions)
    (copied,) = [n for n in rewritten.nodes if n.name == "copied"]
    assert copied.users
    assert all(region_of(n) == "backward" for n in copied.users)
    again = program_from_joint(rewritten)
    assert simulate(again, full_plan(again)).peak_bytes >= simulate(program, full_plan(program)).peak_bytes


def test_recompute_after_an_overwrite_is_refused() -> None:
    class Bumped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * self.scale.sin()).exp().cos()
            self.scale.add_(1)
            return y.sum()

    (joint,) = capture(Bumped(), (torch.randn(4, requires_grad=True),))
    program = program_from_joint(joint)
    sine = next(op for op in program.ops if op.target == "aten.sin.default")
    assert not sine.recomputable
    actions = list(full_plan(program))
    position = actions.index(StartBackward()) + 1
    with pytest.raises(VerifyError, match="overwritten"):
        emit(joint, program, [*actions[:position], Recompute(sine.index), *actions[position:]])


def test_a_value_that_is_not_there_is_named(captured) -> None:
    joint, program = captured
    last = max(op.index for op in program.ops if op.region == "forward" and not program.is_folded(op))
    with pytest.raises(VerifyError, match="is read before it is computed"):
        emit(joint, program, [Compute(last)])
