"""Random ops that run again: the same draws, and nothing drawn anew."""

import pytest
import torch
import torch.nn.functional as F
from random_plans import full_plan, random_plan
from torch import Tensor, fx, nn

from fxmem.capture import JointGraph, capture
from fxmem.capture.draws import RNG_STATE, replay, save_states, state_name
from fxmem.capture.effects import is_random
from fxmem.errors import VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes import rewrite
from fxmem.passes.base import verify_recompute
from fxmem.passes.stage_split import split_stages
from fxmem.schedule.actions import Recompute

SIZE = 64  # a result of SIZE x SIZE floats takes more bytes than a generator's state


def attention(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], dropout_p=0.4)[0, 0]


DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.5),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, training=True),
    "randn_like": lambda h: h + torch.randn_like(h),
    "rand": lambda h: h * torch.rand(SIZE, SIZE),
    "randint": lambda h: h * torch.randint(1, 5, (SIZE, SIZE)),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.3)),
    "multinomial": lambda h: h.flatten()[torch.multinomial(h.detach().flatten(), SIZE * SIZE, replacement=True)],
    "randperm": lambda h: h.flatten()[torch.randperm(SIZE * SIZE)],
    "normal": lambda h: h * torch.normal(h.detach(), 1.0),
    "exponential": lambda h: h * torch.empty_like(h).exponential_(),
    "beta": lambda h: h * torch.distributions.Beta(h.detach() + 1, h.detach() + 1).sample(),
    "attention": attention,
    "rrelu": lambda h: F.rrelu(h - 1.5, training=True),
}


class Drawn(nn.Module):
    """Something random three times, between functions that are cheap to recompute."""

    def __init__(self, draw):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE) + 0.5)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.draw((x * self.weight).cos().exp().view(SIZE, SIZE)).view(SIZE, SIZE).sin() + 0.1
        return x.square().sum()


def captured(draw) -> JointGraph:
    (joint,) = capture(Drawn(draw), (torch.rand(SIZE, SIZE),))
    return joint


def run(joint: JointGraph) -> tuple[list[Tensor], Tensor]:
    """Results of the joint graph from one seed, and the state in which it leaves the generator."""
    values = torch.Generator().manual_seed(1)
    inputs = [torch.rand(n.meta["val"].shape, generator=values) + 0.5 for n in joint.nodes if n.op == "placeholder"]
    torch.manual_seed(3)
    results = fx.Interpreter(joint.graph_module).run(*inputs, enable_io_processing=False)
    return [r for r in results if r is not None], torch.get_rng_state()


@pytest.mark.parametrize("name", DRAWS)
def test_a_second_run_draws_the_same_and_leaves_the_generator_alone(name: str) -> None:
    joint = captured(DRAWS[name])
    program = program_from_joint(joint)
    rewritten = rewrite(joint, program, random_plan(program, seed=0, keep=0.0))
    replays = [n for n in rewritten.nodes if n.target is replay]
    assert len(program.states) >= 3
    assert len(replays) >= 3
    (expected, state), (found, state_after) = run(joint), run(rewritten)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(state, state_after)


def test_what_does_not_run_again_costs_no_state() -> None:
    joint = captured(DRAWS["dropout"])
    program = program_from_joint(joint)
    assert len(program.states) == 3
    rewritten = rewrite(joint, program, full_plan(program))
    assert not any(n.target is RNG_STATE for n in rewritten.nodes)
    once = next(op for op in program.ops if op.is_random and op.recomputable)
    more = rewrite(joint, program, _with_one_more(program, once.index))
    assert [n.name for n in more.nodes if n.target is RNG_STATE] == [program.state_op(once).name]


def _with_one_more(program, op: int):
    """Everything saved, and one forward op once more in backward."""
    actions = list(full_plan(program))
    state = program.state_op(program.ops[op]).index
    first = next(i for i, a in enumerate(actions) if getattr(a, "op", -1) == op)
    actions.insert(first, type(actions[first])(state))
    return (*actions, Recompute(op))


def test_a_graph_without_backward_and_small_results_have_no_states() -> None:
    (forward_only,) = capture(lambda x: F.dropout(x, 0.5), (torch.rand(SIZE, SIZE),))
    (small,) = capture(lambda x: F.dropout(x, 0.5).sum(), (torch.rand(8, requires_grad=True),))
    for joint in (forward_only, small):
        assert any(is_random(n) for n in joint.nodes)
        assert not any(n.target is RNG_STATE for n in joint.nodes)


def test_a_replay_from_another_state_is_refused() -> None:
    joint = captured(DRAWS["dropout"])
    program = program_from_joint(joint)
    rewritten = rewrite(joint, program, random_plan(program, seed=0, keep=0.0))
    states = [n for n in rewritten.nodes if n.target is RNG_STATE]
    again = next(n for n in rewritten.nodes if n.target is replay and n.args[0] is not states[0])
    again.args = (states[0], *again.args[1:])
    with pytest.raises(VerifyError, match=r"node native_dropout\w* replays native_dropout\w*, but not from the state"):
        verify_recompute(rewritten)


def test_a_state_read_too_early_is_refused() -> None:
    joint = captured(DRAWS["dropout"])
    program = program_from_joint(joint)
    rewritten = rewrite(joint, program, random_plan(program, seed=0, keep=0.0))
    draws = [n for n in rewritten.nodes if n.target is torch.ops.aten.native_dropout.default]
    draws[0].prepend(next(n for n in rewritten.nodes if n.name == state_name(draws[1])))
    with pytest.raises(VerifyError, match="but not from the state"):
        verify_recompute(rewritten)


def test_a_stage_has_the_states_of_its_own_draws() -> None:
    joint = captured(DRAWS["dropout"])
    position = {n.name: i for i, n in enumerate(joint.nodes)}
    graphs = split_stages(joint, [position["native_dropout_1"]])  # between the op and the state it draws from
    assert [len(program_from_joint(graph.joint).states) for graph in graphs] == [1, 2]
    for graph in graphs:
        program = program_from_joint(graph.joint)
        rewrite(graph.joint, program, random_plan(program, seed=0, keep=0.0))


def test_an_op_with_a_generator_of_its_own_has_no_state() -> None:
    joint = captured(DRAWS["bernoulli"])
    (first, *_) = [n for n in joint.nodes if n.target is torch.ops.aten.bernoulli.default]
    assert state_name(first) is not None
    graph = joint.graph_module.graph
    first.meta.pop("fxmem_rng_state")
    first.kwargs = {"generator": torch.Generator()}
    assert save_states(graph, [first]) == 0
    assert not next(op for op in program_from_joint(joint).ops if op.name == first.name).recomputable
