"""The pass contract: what the manager accepts, refuses and writes down."""

import json
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from random_plans import full_plan, random_plan
from torch import fx, nn

from fxmem.capture import JointGraph, capture
from fxmem.errors import VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes import Checkpoint, GraphPass, run_passes


@pytest.fixture(scope="module")
def joint() -> JointGraph:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4), nn.Sigmoid())
    return capture(lambda x: model(x).sum(), (torch.randn(2, 4),))[0]


def copy_of(joint: JointGraph) -> JointGraph:
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph_module.graph, {}))
    for copied, source in zip(graph.nodes, joint.graph_module.graph.nodes, strict=True):
        copied.meta = dict(source.meta)
    return replace(joint, graph_module=fx.GraphModule(joint.graph_module, graph))


@dataclass(frozen=True)
class Nothing(GraphPass):
    name: ClassVar[str] = "nothing"

    def apply(self, joint: JointGraph) -> JointGraph:
        return joint


@dataclass(frozen=True)
class Spoil(GraphPass):
    """Breaks the contract in the way that `how` says."""

    how: str
    name: ClassVar[str] = "spoil"

    def apply(self, joint: JointGraph) -> JointGraph:
        joint = copy_of(joint)
        graph = joint.graph_module.graph
        nodes = {n.name: n for n in graph.nodes}
        if self.how == "dtype":
            output = nodes["output"]
            result = output.args[0][0]
            with graph.inserting_before(output):
                half = graph.call_function(torch.ops.aten.to.dtype, (result, torch.float16))
            half.meta = {"val": result.meta["val"].half()}
            forward = list(graph.nodes)[: joint.num_forward_nodes]
            forward[-1].append(half)
            output.args = ((half, *output.args[0][1:]),)
            return replace(joint, num_forward_nodes=joint.num_forward_nodes + 1)
        if self.how == "meta":
            nodes["tanh"].meta.pop("val")
        if self.how == "effects":
            (draw,) = [n for n in graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())]
            with graph.inserting_after(draw):
                twice = graph.node_copy(draw, lambda n: n)
            twice.meta = dict(draw.meta)
            return replace(joint, num_forward_nodes=joint.num_forward_nodes + 1)
        if self.how == "boundary":
            return replace(joint, num_forward_nodes=3)
        return joint


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("dtype", r"pass spoil changed .* output 0 was torch.float32\[\], is torch.float16\[\]"),
        ("meta", r"after pass spoil, check metadata: node tanh .* no meta"),
        ("effects", r"pass spoil: effects lost {}, repeated {\('random'"),
        ("boundary", r"after pass spoil, check lint: forward output .* is computed in backward"),
    ],
)
def test_a_pass_that_breaks_the_contract_is_named(joint: JointGraph, how: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        run_passes(joint, [Nothing(), Spoil(how)])


def test_ensures_are_checked_after_a_pass_and_requires_before(joint: JointGraph) -> None:
    @dataclass(frozen=True)
    class Promises(Nothing):
        name: ClassVar[str] = "promises"
        ensures: ClassVar[frozenset[str]] = frozenset({"regions"})

    @dataclass(frozen=True)
    class Needs(Nothing):
        name: ClassVar[str] = "needs"
        requires: ClassVar[frozenset[str]] = frozenset({"regions"})

    with pytest.raises(VerifyError, match="after pass promises, check regions"):
        run_passes(joint, [Promises()])
    with pytest.raises(VerifyError, match="before pass needs, check regions"):
        run_passes(joint, [Needs()])
    program = program_from_joint(joint)
    assert run_passes(joint, [Checkpoint(program, full_plan(program)), Needs(), Promises()]).changed


def test_a_pass_reports_what_it_added(joint: JointGraph) -> None:
    program = program_from_joint(joint)
    result = run_passes(joint, [Nothing(), Checkpoint(program, random_plan(program, seed=0, keep=0.0))])
    nothing, checkpoint = result.reports
    assert not nothing.changed
    assert nothing.num_added == {}
    assert checkpoint.changed
    assert checkpoint.num_added["aten.addmm.default"] == 2  # the second for the sigmoid
    assert checkpoint.seconds > 0


def test_debug_switch_writes_both_graphs_and_the_difference(joint: JointGraph, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FXMEM_DEBUG", str(tmp_path / "dump"))
    program = program_from_joint(joint)
    run_passes(joint, [Checkpoint(program, random_plan(program, seed=0, keep=0.0))])
    before, after, report = sorted((tmp_path / "dump").iterdir(), key=lambda p: ["before", "after", "json"].index(
        p.name.split(".")[-2] if p.suffix == ".txt" else "json"
    ))  # fmt: skip
    assert "_remat" not in before.read_text()
    assert "%addmm_remat = aten.addmm.default(" in after.read_text()
    assert after.read_text().count("--- backward ---") == 1
    assert json.loads(report.read_text())["num_added"]["aten.addmm.default"] == 2
