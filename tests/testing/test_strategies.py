"""Everything that fxmem.testing draws, through what fxmem does with it; `make fuzz` runs this file, 10,000 of each."""

import re

import pytest
import torch
from hypothesis import strategies as st

import fxmem
from fxmem.errors import OptionError
from fxmem.ir.from_fx import program_from_joint
from fxmem.passes.offload import why_not_offloadable
from fxmem.runtime.transfers.threads import ThreadEngine
from fxmem.testing import (
    FEATURES,
    DrawnModule,
    check_engine,
    check_gradients,
    check_pass,
    check_plan,
    check_planner,
    check_program,
    check_rewrite,
    graph_module,
    graph_modules,
    joint_graph,
    joint_graphs,
    modules,
    plans,
    programs,
    schedules,
    transfers,
)
from fxmem.testing.observe import difference
from tests.testing.broken import rebuilt, without_dead_code
from tests.testing.runs import fuzz, run


def test_modules() -> None:
    fuzz("modules", modules(), _check_module)


def _check_module(drawn: DrawnModule) -> None:
    """Its repr makes it again; two builds train alike, in eager mode."""
    again = eval(repr(drawn))
    assert again.source == drawn.source
    (module, args), (other, same_args) = drawn.build(), again.build()
    for one, two in zip((*args, *module.parameters()), (*same_args, *other.parameters()), strict=True):
        assert not difference(one, two)
    check_gradients(module, module, args, tolerance=0.0)


@pytest.mark.slow
def test_graph_modules() -> None:
    def check(graph):
        check_pass(without_dead_code, graph)
        check_pass(rebuilt, graph)

    fuzz("graph_modules", graph_modules(), check)


@pytest.mark.slow
def test_joint_graphs() -> None:
    """A random schedule, transfers included, played on the graph."""

    @st.composite
    def planned(draw):
        joint = draw(joint_graphs((1, 5)))
        program = program_from_joint(joint)
        return joint, program, draw(schedules(program, ("host",), why_not_offloadable(joint, program, 1)))

    def check(drawn):
        joint, program, actions = drawn
        check_program(program)
        check_rewrite(joint, actions, program)

    fuzz("joint_graphs and schedules", planned(), check)


@pytest.mark.slow
def test_programs() -> None:
    def check(program):
        check_program(program)
        level = program.extra_resident_bytes + sum(program.nbytes()) // 2
        for planner in ("none", "full", "sqrt"):
            check_planner(planner, program, level)

    fuzz("programs", programs(), check)


@pytest.mark.slow
def test_plans() -> None:
    fuzz("plans", plans(), check_plan)


@pytest.mark.slow
def test_transfers() -> None:
    fuzz("transfers", transfers(), lambda drawn: check_engine(lambda lay, hook: ThreadEngine(lay, None, hook), drawn))


@pytest.mark.slow
def test_compiled_modules() -> None:
    """What `fxmem.compile` makes of them trains as eager mode does."""

    def check(drawn):
        module, args = drawn.build()
        torch.compiler.reset()
        check_gradients(fxmem.compile(module, budget="min"), module, args)

    fuzz("compiled modules", modules((1, 4), without=NOT_COMPILED), check, 20)


# Eager mode draws with other ops and rounds bfloat16 elsewhere; Dynamo warns of functions on what learns nothing;
# the others are not tried here.
NOT_COMPILED = {
    "random", "low precision", "custom functions", "overwritten inputs", "outputs", "empty tensors"
}  # fmt: skip


def test_a_drawn_graph_prints_as_code_that_makes_it() -> None:
    drawn = DrawnModule(
        "import torch\nmodule = torch.nn.Linear(2, 3)\nargs = (torch.ones(1, 2),)\n"
    )
    joint = joint_graph(drawn)
    again = eval(repr(joint.graph_module))
    assert again.fingerprint == joint.fingerprint
    graph = graph_module(drawn.source + "from torch.fx.experimental.proxy_tensor import make_fx\n"
                         "graph_module = make_fx(module)(*args)\n")  # fmt: skip
    assert str(eval(repr(graph)).graph) == str(graph.graph)


def test_features_are_left_out() -> None:
    found: set[str] = set()

    def check(drawn):
        assert "dropout" not in drawn.source
        assert "Conv" not in drawn.source
        found.add(drawn.source)

    fuzz("modules without", modules(without={"random", "convolutions"}), check, 100)
    assert len(found) > 90
    with pytest.raises(OptionError, match="choose from"):
        run(modules(without={"weather"}), str, 1)


@pytest.mark.slow
def test_every_feature_is_drawn() -> None:
    words = {
        "attention": "scaled_dot",
        "buffers": "buffer",
        "casts": "double|where| > 0",
        "concatenation": "torch.(cat|stack)",
        "convolutions": "Conv",
        "custom functions": "autograd.Function",
        "empty tensors": r"randn\(0",
        "images": "pool2d|F.pad|channels_last|interpolate",
        "in-place ops": r"_\(",
        "indexing": "topk|sort|flip|roll|select|tril|take",
        "inputs": r"randn\(",
        "integers": "Embedding",
        "linear": "nn.Linear",
        "low precision": "bfloat16",
        "norms": "Norm",
        "outputs": "return v0, ",
        "overwritten inputs": "x1.",
        "pointwise": "tanh",
        "random": "dropout",
        "reductions": "softmax|mean|amax|cumsum|logsumexp",
        "residuals": r"F.gelu\(self",
        "scalars": r"randn\(\(\),",
        "strided inputs": r"\.t\(\)|::2|expand",
        "tied weights": ".weight",
        "views": "transpose",
    }
    assert words.keys() == FEATURES
    drawn: list[str] = []
    fuzz("features", modules(), lambda module: drawn.append(module.source), 300)
    assert [name for name, word in words.items() if not any(re.search(word, source) for source in drawn)] == []
