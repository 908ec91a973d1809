"""`fxmem.pipeline` without processes: what it decides, what it refuses, and the parts it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxmem
from fxmem.capture import capture
from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes.stage_split import CutError, split_stages
from fxmem.pipelining.model_chain import model_chain
from fxmem.pipelining.planned import microbatch_counts
from fxmem.pipelining.stage_plan import StagePlanner, lane_program
from fxmem.planners import Options
from fxmem.planners.problem import reduce_program
from fxmem.runtime.pipeline.code import StageCode, stage_program
from fxmem.runtime.pipeline.sink import deliver
from fxmem.schedule import Machine, simulate
from fxmem.schedule.simulate import Link
from tests.zoo import build


class SharedNorm(nn.Module):
    """One BatchNorm after every layer: its statistics tie all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x.square().mean()


class TwoBiases(nn.Module):
    """Two parameters whose gradients are one value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.first + self.second).square().mean()


def pipeline(**options: object) -> fxmem.PlannedPipeline:
    model, args = build("mlp")
    chosen: dict[str, object] = {"num_stages": 2, "num_microbatches": 4, "solve_s": 0.1} | options
    return fxmem.pipeline(model, args, **chosen)  # type: ignore[arg-type]


def test_what_the_plan_says() -> None:
    plan = pipeline(schedule="1f1b").plan
    assert [stage.in_flight for stage in plan.stages] == [2, 1]
    assert [stage.rank for stage in plan.stages] == [0, 1]
    assert plan.step_s > 4 * max(stage.busy_s for stage in plan.stages)
    assert 0 < plan.bubble < 1
    assert plan.gap >= 0
    assert all(stage.peak_bytes == plan.peak_bytes[stage.rank] for stage in plan.stages)
    assert "2 stages on 2 devices, 1f1b" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["auto", "1f1b", "interleaved"])
def test_the_budget_named_by_the_error_is_enough(schedule: str) -> None:
    with pytest.raises(BudgetInfeasible, match=r"rank \d.*stage \d") as caught:
        pipeline(schedule=schedule, budget=20_000)
    assert caught.value.at_peak[0][0].startswith("stage ")
    assert caught.value.min_bytes > 20_000
    plan = pipeline(schedule=schedule, budget=caught.value.min_bytes).plan
    assert max(plan.peak_bytes) <= caught.value.min_bytes


@pytest.mark.slow
def test_tighter_budgets_take_longer_and_hold() -> None:
    model, args = build("gpt2")
    options = {"num_stages": 2, "num_microbatches": 2, "schedule": "1f1b", "solve_s": 0.1}
    roomy = fxmem.pipeline(model, args, **options).plan
    tight = fxmem.pipeline(model, args, 0.8, **options).plan
    assert tight.budget_bytes is not None
    assert max(tight.peak_bytes) <= tight.budget_bytes < max(roomy.peak_bytes)
    assert tight.step_s > roomy.step_s


@pytest.mark.slow
def test_schedule_and_number_of_microbatches_are_chosen_together() -> None:
    found = pipeline(num_microbatches=None)
    plan, tried = found.plan, found.plan.tried
    assert {t.num_microbatches for t in tried} == {8, 4, 2}, "rows: 8; 4, 2 and 1 a stage"
    assert {t.schedule for t in tried} == {"1f1b-n", "zero-bubble", "interleaved", "interleaved-zb", "zbv", "dualpipev"}
    assert found.runtime.num_microbatches == plan.num_microbatches
    best = min((t for t in tried if t.step_s is not None), key=lambda t: t.step_s or 0.0)
    assert plan.step_s >= best.step_s * 0.9, "the chain's promise is about what the stages do"
    assert "chosen from" in str(plan)
    fixed = pipeline(num_microbatches=4, schedule="1f1b").plan
    assert [(t.schedule, t.num_microbatches) for t in fixed.tried] == [("1f1b", 4)], "what is named stays"


def test_the_numbers_of_microbatches_to_choose_from() -> None:
    rows = [torch.zeros(()), torch.zeros(96, 3)]
    assert microbatch_counts(rows, 4) == (16, 8, 32, 4)
    assert microbatch_counts(rows, 5) == (16, 8, 32, 4), (
        "equal microbatches: the next smaller divisors of 20, 10, 40, 5"
    )
    assert microbatch_counts([torch.zeros(3)], 8) == (3,)
    with pytest.raises(OptionError, match="no tensor with a batch dimension"):
        microbatch_counts([torch.zeros(())], 2)


def test_optimizer_state_counts() -> None:
    model, args = build("mlp")
    plain = fxmem.pipeline(model, args, num_stages=2, num_microbatches=4, schedule="1f1b").plan
    adam = torch.optim.AdamW(model.parameters())
    plan = fxmem.pipeline(model, args, num_stages=2, num_microbatches=4, schedule="1f1b", optimizer=adam).plan
    for stage in plan.stages:
        more = plan.peak_bytes[stage.rank] - plain.peak_bytes[stage.rank]
        assert more == pytest.approx(2 * stage.static_bytes, rel=0.01)


def test_a_model_that_cannot_be_cut_says_why() -> None:
    with pytest.raises(CutError, match=r"can't be cut into 4 stages: norm\.\w+ is overwritten in every step"):
        fxmem.pipeline(SharedNorm(), (torch.randn(8, 8),), num_stages=4, num_microbatches=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiers": "tape"}, "unknown tier 'tape'.*host, disk"),
        ({"schedule": "fast"}, "unknown schedule 'fast': choose one of auto, gpipe"),
        ({"planner": "best"}, "unknown pipeline planner 'best': choose one of auto"),
        ({"num_stages": 0}, "num_stages must be a positive number"),
        ({"num_microbatches": 9}, "8 rows can't be 9 microbatches"),
        ({"stage_planner": "none such"}, "unknown planner"),
    ],
)
def test_malformed_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        pipeline(**options)


def test_a_chain_has_the_time_of_its_graph() -> None:
    model, args = build("gpt2")
    (joint,) = capture(model, args, frontend="aot")
    program = program_from_joint(joint)
    program = program.with_costs([1e-3] * len(program.ops), [0] * len(program.ops))
    chain = model_chain(joint, program, lambda name: 1.0, 24, 2).chain
    floating = reduce_program(program).baseline_s - sum(block.total_s for block in chain.blocks)
    assert 0 <= floating < 0.1 * program.ops[0].seconds * len(program.ops)
    assert sum(block.static_bytes for block in chain.blocks) >= len(joint.static_inputs), "tied ones more than once"


def test_a_stage_plan_pays_for_every_microbatch_in_flight() -> None:
    model, args = build("gpt2")
    (joint,) = capture(model, args, frontend="aot")
    ops = [i for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
    graph = split_stages(joint, [ops[len(ops) // 2]])[0]
    program = stage_program(graph)
    program = program.with_costs([1e-5] * len(program.ops), [0] * len(program.ops))
    planner = StagePlanner(graph, program, "auto", Options(solve_s=0.5))
    whole = planner.everything_saved
    found = planner.plan(whole.need_bytes(4) * 2 // 3, 4)
    assert found.need_bytes(4) <= whole.need_bytes(4) * 2 // 3
    assert found.saved_bytes < whole.saved_bytes
    assert found.extra_s > 0
    StageCode(graph, found.actions)  # the actions are the graph's own
    with pytest.raises(BudgetInfeasible):
        planner.plan(100, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt2_dropout"])
def test_a_stage_is_never_worse_for_a_tier(name: str) -> None:
    """Neither in the fewest bytes it needs nor, under a room that does without, in time."""
    model, args = build(name)
    (joint,) = capture(model, args, frontend="aot")
    ops = [i for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
    graph = split_stages(joint, [ops[len(ops) // 2]])[0]
    program = stage_program(graph)
    program = program.with_costs([1e-5] * len(program.ops), [0] * len(program.ops))
    options = Options(solve_s=0.1, machine=Machine({"disk": Link(1e7, 1e7)}))
    alone = StagePlanner(graph, program, "auto", options)
    other = StagePlanner(graph, program, "auto", replace(options, tiers=("disk",)))
    least, with_tier = alone.smallest(8), other.smallest(8)
    assert with_tier.need_bytes(8) <= least.need_bytes(8)
    if name == "gpt2_dropout":  # small draws that are not replayed are saved, or moved
        assert with_tier.need_bytes(8) < 0.8 * least.need_bytes(8)
    room = least.need_bytes(8) * 5 // 4
    assert other.plan(room, 8).extra_s <= alone.plan(room, 8).extra_s


def test_nothing_stands_after_a_microbatch() -> None:
    """In the program that stage planners see, messages and gradients come and go."""
    model, args = build("llama")
    (joint,) = capture(model, args, frontend="aot")
    ops = [i for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
    for graph in split_stages(joint, [ops[len(ops) // 2]]):
        lane, original = lane_program(stage_program(graph), graph)
        problem = reduce_program(lane)
        result = simulate(lane, problem.actions(range(problem.num_kernels), problem.num_forward))
        assert all(last < len(result.bytes_at) for _, _, last in result.lifetimes)
        assert len(original) == len(lane.ops)


def test_parameters_whose_gradients_are_one_value_do_not_share_it() -> None:
    (joint,) = capture(TwoBiases(), (torch.randn(4, 8),), frontend="aot")
    (graph,) = split_stages(joint, [])
    nodes = StageCode(graph).module("B").graph.find_nodes(op="call_function", target=deliver)
    assert [node.args[1] for node in nodes] == [0, 1]
    keys = [node.args[2] for node in nodes]
    assert keys[0] is not keys[1] or not any(node.args[3] for node in nodes)
