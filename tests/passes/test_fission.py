"""Steps whose regions run part by part compute what they computed before, up to the order of sums."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_plans import full_plan
from split_steps import Step, assert_close
from torch import Tensor, fx, nn
from zoo import build

from fxmem.analysis.peak import peak
from fxmem.analysis.regions import Fission, grow
from fxmem.capture import JointGraph, boxed
from fxmem.capture.notes import META
from fxmem.capture.overwritten import written_args
from fxmem.errors import PlanMismatch, VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes import rewrite, run_passes
from fxmem.passes.accumulators import verify_accumulators, writes_own
from fxmem.passes.fission import SplitRegions
from fxmem.step.lower import lower
from fxmem.step.measurement import measure
from fxmem.testing import joint_graphs
from fxmem.testing.pass_checks import example_args

aten = torch.ops.aten


class Classifier(nn.Module):
    """Layer norm, two layers, cross entropy over `num_classes`; `tied`: embeds tokens by the last layer's weights."""

    def __init__(self, num_classes: int = 32, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_classes, 8) if tied else nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 16)
        self.back = nn.Linear(16, 8)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, num_classes, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.drop(self.back(F.gelu(self.hidden(self.norm(x)))))
        return F.cross_entropy(self.head(x), labels)


def classifier(rows: int = 12, ignored: int = 0, tied: bool = False, dropout: float = 0.0) -> Step:
    torch.manual_seed(0)
    labels = torch.randint(32, (rows,))
    labels[:ignored] = -100
    x = torch.randint(32, (rows,)) if tied else torch.randn(rows, 8)
    return Step(Classifier(tied=tied, dropout=dropout), (x, labels))


plain = functools.cache(classifier)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("num_parts", [2, 5])
@pytest.mark.parametrize("kind", ["loss", "whole"])
def test_outputs_are_the_same(kind: str, num_parts: int, fuse: bool) -> None:
    step = plain()
    fission = step.loss(num_parts, fuse) if kind == "loss" else step.whole(num_parts, fuse)
    split = step.assert_same(fission, tangent=2.5)
    parts = {n.meta[META]["part"] for n in split.nodes if "part_of" in n.meta.get(META, {})}
    assert parts == set(range(fission.num_parts))


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("options", [{"ignored": 7}, {"tied": True}, {"dropout": 0.5}, {"rows": 13}], ids=str)
def test_labels_ignored_weights_tied_dropout_and_ragged_parts(options: dict[str, int], fuse: bool) -> None:
    step = classifier(**options)  # type: ignore[arg-type]
    step.assert_same(step.whole(3, fuse), tangent=-0.5)


def test_one_part_may_have_no_label_that_counts() -> None:
    step = classifier(ignored=6)
    step.assert_same(step.whole(2, True))


def test_a_batch_of_one_is_refused_with_the_reason() -> None:
    step = classifier(rows=1)
    region = step.region(Fission(step.whole().seed, 0, (0, 1)))
    assert "not the borders of several parts" in region.refused
    with pytest.raises(PlanMismatch, match="can't split"):
        step.split(region.fission)


@pytest.mark.parametrize("fuse", [False, True])
def test_half_precision_adds_up_in_float32(fuse: bool) -> None:
    torch.manual_seed(0)
    step = Step(Classifier(), (torch.randn(64, 8), torch.randint(32, (64,))), _bfloat16)
    split = step.assert_same(step.whole(16, fuse), tolerance=2e-2)
    sums = [n for n in split.nodes if n.target in (aten.add_.Tensor, aten.addmm_.default)]
    assert sums
    assert all(n.meta["val"].dtype in (torch.float32, torch.int64) for n in sums)
    assert any(n.target is aten.mm.default and n.meta["val"].dtype is torch.bfloat16 for n in split.nodes)


def _bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def test_forward_and_backward_keep_their_parts_unless_gradients_run_in_forward() -> None:
    step = plain()
    unfused, fused = step.split(step.whole(3)), step.split(step.whole(3, True))
    original = {n.name: i for i, n in enumerate(step.joint.nodes)}
    for position, node in enumerate(unfused.nodes):
        source = node.meta.get(META, {}).get("part_of")
        if source is not None and node.target is not aten.slice.Tensor:
            is_forward = original[source] < step.joint.num_forward_nodes
            assert (position < unfused.num_forward_nodes) == is_forward
    backward = fused.nodes[fused.num_forward_nodes :]
    assert not any("part_of" in n.meta.get(META, {}) for n in backward)
    assert {n.target for n in backward if n.op == "call_function" and not n.name.startswith("t_")} >= {aten.mul.Tensor}


def test_saved_gradients_are_not_written_by_backward_which_may_run_twice() -> None:
    step = plain()
    split = step.split(step.whole(3, True))
    late = set(split.nodes[split.num_forward_nodes :])
    assert not any(written_args(node) for node in late)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "gpt2_dropout"])
@pytest.mark.slow
def test_language_models(name: str) -> None:
    step = Step(*build(name))
    for fuse in (False, True):
        step.assert_same(step.loss(2, fuse), tangent=3.0)
    step.assert_same(step.whole(2, True), tangent=3.0)


@pytest.mark.parametrize("name", ["vit", "unet"])
@pytest.mark.slow
def test_whole_steps_along_the_batch(name: str) -> None:
    step = Step(*build(name))
    for fuse in (False, True):
        step.assert_same(step.whole(2, fuse), tangent=3.0)


class ByLabel(torch.autograd.Function):
    """The gradient of a row is a multiple of its label, where that counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (labels,) = ctx.saved_tensors
        counted = torch.where(labels > 3, labels, 0).float()
        return gradients[0].sum() * counted[:, None].expand_as(gradients[0]).clone(), None


class Truncated(torch.autograd.Function):
    """A gradient of whole thousandths: not one that can be scaled afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return (1000 * gradients[0]).to(torch.int32) / 1000


class Noisy(torch.autograd.Function):
    """Draws in backward, anew each time it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.rand(8)


class Custom(Classifier):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.function(self.norm(x), labels)), labels)


def test_gradients_written_by_the_user_are_scaled_afterwards_where_that_is_the_same() -> None:
    torch.manual_seed(0)
    args = torch.randn(12, 8), torch.randint(32, (12,))
    step = Step(Custom(ByLabel.apply), args)
    step.assert_same(step.whole(3, True), tangent=2.5, tolerance=2e-4)
    step = Step(Custom(lambda x, labels: Truncated.apply(x)), args)
    assert "not known to be proportional" in step.region(step.whole(3, True)).refused
    step = Step(Custom(lambda x, labels: Noisy.apply(x)), args)
    assert "has effects" in step.region(step.whole(3, True)).refused
    step.assert_same(step.whole(3), tangent=2.5)


def test_peak_falls_by_what_stands_in_parts_only() -> None:
    torch.manual_seed(0)
    step = Step(Classifier(4096), (torch.randn(64, 8), torch.randint(4096, (64,))))
    logits_bytes = 64 * 4096 * 4
    before = _peak(step.joint)
    assert before - _peak(step.split(step.loss(8))) >= 1.5 * logits_bytes
    assert before - _peak(step.split(step.loss(8, True))) >= 2.25 * logits_bytes


def _peak(joint: JointGraph) -> int:
    return peak(program_from_joint(joint)).peak_bytes


def test_two_regions_of_one_graph() -> None:
    step = plain()
    hidden = step.largest(aten.gelu.default)
    loss, inner = step.loss(3), step.fission(hidden, 0, 4, min_bytes=12 * 16 * 4)
    split = step.split(loss, inner)
    numbers = {n.meta[META]["parts"] for n in split.nodes if "part_of" in n.meta.get(META, {})}
    assert numbers == {3, 4}
    for one, other in zip(step.run(step.joint), step.run(split), strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_outputs_keep_their_names_and_the_models_lines() -> None:
    step = plain()
    split = step.split(step.loss(3))
    assert [getattr(r, "name", r) for r in split.outputs] == [getattr(r, "name", r) for r in step.joint.outputs]
    assert all(n.name in split.sources for n in split.nodes if n.name.startswith("_log_softmax_part"))


# verification


def _split_loss() -> JointGraph:
    step = plain()
    return step.split(step.loss(3))


def _rewired(joint: JointGraph, edit: object) -> JointGraph:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(joint.graph_module.graph, values))
    edit({old.name: new for old, new in values.items()})  # type: ignore[operator]
    return replace(joint, graph_module=fx.GraphModule(joint.graph_module, graph))


def test_verifier_accepts_what_the_pass_writes_and_nothing_is_the_models() -> None:
    joint = _split_loss()
    verify_accumulators(joint)
    assert {n.target for n in writes_own(joint)} <= {aten.add_.Tensor, aten.addmm_.default, aten.copy_.default}
    assert writes_own(joint)


def test_a_sum_read_before_its_last_part_is_found() -> None:
    joint = _split_loss()
    last = next(n for n in reversed(joint.nodes) if n.target is aten.addmm_.default)

    def read_early(nodes: dict[str, fx.Node]) -> None:
        node = nodes[last.name]
        with node.graph.inserting_before(node):
            early = node.graph.call_function(aten.neg.default, (node.args[0],))
        early.meta["val"] = torch.empty_like(node.meta["val"])

    with pytest.raises(VerifyError, match="before its last part"):
        verify_accumulators(_rewired(joint, read_early))


def test_a_part_written_twice_or_left_out_is_found() -> None:
    step = plain()
    joint = step.split(step.loss(3))
    copy = next(n for n in joint.nodes if n.target is aten.copy_.default and n.meta[META]["part"] == 1)
    place = copy.args[0]
    assert isinstance(place, fx.Node)

    def misplace(nodes: dict[str, fx.Node]) -> None:
        nodes[place.name].args = (*nodes[place.name].args[:2], 0, 4)

    with pytest.raises(VerifyError, match="leave something out, or overlap"):
        verify_accumulators(_rewired(joint, misplace))


def test_an_accumulator_that_runs_again_is_found() -> None:
    joint = _split_loss()
    first = next(n for n in joint.nodes if n.target is aten.addmm_.default).args[0]
    assert isinstance(first, fx.Node)

    def repeat(nodes: dict[str, fx.Node]) -> None:
        nodes[first.name].meta = {**first.meta, META: {**first.meta[META], "recompute_of": "mm"}}

    with pytest.raises(VerifyError, match="runs again"):
        verify_accumulators(_rewired(joint, repeat))


def test_other_passes_may_not_write_in_place() -> None:
    class Writes(SplitRegions):
        ensures = frozenset()

    step = plain()
    with pytest.raises(VerifyError, match="repeated"):
        run_passes(step.joint, [Writes((step.loss(3),))])


def test_every_value_along_every_dim_gives_the_same() -> None:
    step = classifier(rows=4)
    found = [fission for seed in range(0, len(step.joint.nodes), 7) for fission in step.fissions(seed)]
    for fission in found:
        step.assert_same(fission)
    assert {fission.fuse for fission in found} == {False, True}


@settings(max_examples=5)
@given(joint=joint_graphs((1, 4)), data=st.data())
def test_random_graphs_split_anywhere_compute_the_same(joint: JointGraph, data: st.DataObject) -> None:
    tensors = [(i, n.meta["val"]) for i, n in enumerate(joint.nodes) if isinstance(n.meta.get("val"), Tensor)]
    places = [(i, d, size) for i, value in tensors for d, size in enumerate(value.shape) if size > 1]
    assume(places)
    seed, dim, size = data.draw(st.sampled_from(places))
    num_parts = data.draw(st.integers(2, size))
    fission = Fission(seed, dim, (*range(0, size, -(-size // num_parts)), size))
    assume(not grow(joint, fission).refused)
    is_half = any(value.dtype in (torch.bfloat16, torch.float16) for _, value in tensors)
    split = run_passes(joint, [SplitRegions((fission,))]).joint
    assert_close(_outputs(joint), _outputs(split, joint), 5e-2 if is_half else 1e-4)


def _outputs(joint: JointGraph, drawn: JointGraph | None = None) -> list[Tensor | None]:
    args = [a.clone() if isinstance(a, Tensor) else a for a in example_args(drawn or joint)]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return list(fx.Interpreter(joint.graph_module).run(*args, enable_io_processing=False))


@pytest.mark.parametrize("fuse", [False, True])
def test_lowered_steps_run_backward_twice_and_measure_as_predicted(fuse: bool) -> None:
    torch.manual_seed(0)
    step = Step(Classifier(4096), (torch.randn(64, 8), torch.randint(4096, (64,))))
    split = step.split(step.whole(4, fuse))
    program = program_from_joint(split)
    lowered = lower(rewrite(split, program, full_plan(program)))
    forward, backward = boxed(lowered.forward), boxed(lowered.backward)
    expected = step.run(split)
    args = step.inputs(split)

    def run() -> list[Tensor | None]:
        with torch.no_grad():
            return list(backward([*forward(list(args))[1:], torch.ones(())]))

    with torch.no_grad():
        saved = forward(list(args))[1:]
        twice = [backward([*saved, torch.ones(())]) for _ in range(2)]
    for gradients in twice:
        assert_close(expected[1:], gradients, 1e-6)
    del saved, twice, gradients
    measured = measure(lambda: run(), "cpu").peak_bytes
    assert abs(measured - peak(program).peak_bytes) <= 0.005 * measured
