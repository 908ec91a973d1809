"""What must hold of a pass: checks that fail with what changed, and where."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxmem import compat
from fxmem.capture import JointGraph
from fxmem.errors import OptionError, VerifyError
from fxmem.passes.base import GraphPass, run_passes, verify_lint, verify_metadata
from fxmem.step.measurement import measure
from fxmem.testing.observe import Observation, difference, differences, first_difference, observe, state_of
from fxmem.testing.random_graphs import EXAMPLE_ARGS

Pass = GraphPass | Callable[[Any], Any]


def check_pass(
    pass_: Pass,
    graph: fx.GraphModule | JointGraph,
    args: Sequence[Any] | None = None,
    *,
    tolerance: float = 0.0,
    seed: int = 0,
    peak: bool = False,
) -> fx.GraphModule:
    """Assert that `pass_` keeps what `graph` does; returns the graph it made.

    `pass_`: a callable that takes a GraphModule and returns one, or None if it edits in place, or something with a
    `graph_module`; or, for a JointGraph, a `GraphPass` or a callable from JointGraph to JointGraph. It is given a copy.
    `args`: arguments to run it with (default: those that `graph_modules` and `joint_graphs` draw).

    Compared with the graph before, under the same random seed:

    - outputs, of the same structure, dtypes, shapes and strides, bit by bit (`tolerance`: relative to the largest
      element), and which of them share memory with each other, an argument, a parameter or a buffer;
    - arguments, parameters, buffers and constants after the run;
    - gradients of all that learns, to a few units in the last place (a JointGraph's are outputs);
    - draws: each random op and each collective as often, and torch's random state after the run;
    - the graph lints, its code is its graph (`recompile` was called), and `meta["val"]` of every node is there, if it
      was before, and says what the node computes;
    - with `peak`: running it takes no more bytes than before, as the allocator counts them.

    Raises AssertionError with every difference and the first node that computes something else.
    """
    if args is None:
        args = example_args(graph)
    before = plain(graph.graph_module) if isinstance(graph, JointGraph) else copy.deepcopy(graph)
    name = str(getattr(pass_, "name", None) or getattr(pass_, "__name__", type(pass_).__name__))
    after = _apply(pass_, graph, name)
    try:
        found = _differences(before, after, args, tolerance, seed, learns=not isinstance(graph, JointGraph))
    except Exception as error:
        text = f"{name}: the graph it made fails: {type(error).__name__}: {error}\n{after.graph}"
        raise AssertionError(text) from error
    if found:
        where = first_difference(before, after, args, seed)
        raise AssertionError("\n  ".join([f"{name} changed what the graph does:", *found]) + where)
    if peak:
        _check_peak(name, before, after, args)
    return after


def example_args(graph: fx.GraphModule | JointGraph) -> tuple[Any, ...]:
    """The arguments that `graph` was drawn with. Raises OptionError if it was not drawn."""
    meta = graph_of(graph).meta
    if EXAMPLE_ARGS not in meta:
        raise OptionError("this graph was not drawn by fxmem.testing: give check_pass the arguments to run it with")
    found: tuple[Any, ...] = meta[EXAMPLE_ARGS]
    return found


def plain(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph of a joint graph module, without AOTAutograd's calling convention."""
    graph = fx.Graph()
    graph.output(tuple(graph.graph_copy(module.graph, {})))  # type: ignore[arg-type]
    return fx.GraphModule(module, graph)


def graph_of(graph: fx.GraphModule | JointGraph) -> fx.GraphModule:
    return graph.graph_module if isinstance(graph, JointGraph) else graph


def _apply(pass_: Pass, graph: fx.GraphModule | JointGraph, name: str) -> fx.GraphModule:
    if isinstance(graph, JointGraph):
        return _apply_to_joint(pass_, graph, name)
    given = copy.deepcopy(graph)
    assert not isinstance(pass_, GraphPass), f"{name} takes a JointGraph: draw joint_graphs()"
    result = pass_(given)
    made = given if result is None else getattr(result, "graph_module", result)
    assert isinstance(made, fx.GraphModule), f"{name} returned {type(result).__name__}, no GraphModule"
    try:
        made.graph.lint()
    except (RuntimeError, AssertionError) as error:
        raise AssertionError(f"{name}: the graph it made does not lint: {error}") from error
    return made


def _apply_to_joint(pass_: Pass, joint: JointGraph, name: str) -> fx.GraphModule:
    text = str(joint.graph_module.graph)
    try:
        if isinstance(pass_, GraphPass):
            made = run_passes(joint, [pass_]).joint
        else:
            made = pass_(joint)
            verify_lint(made)
            verify_metadata(made)
    except (VerifyError, RuntimeError) as error:
        raise AssertionError(f"{name}: {error}") from error
    assert str(joint.graph_module.graph) == text, f"{name} edited the graph it was given"
    return plain(made.graph_module)


def _differences(
    before: fx.GraphModule, after: fx.GraphModule, args: Sequence[Any], tolerance: float, seed: int, learns: bool
) -> list[str]:
    names = list(state_of(before))
    one = observe(before, args, seed, learns)
    other = observe(after, args, seed, learns, names=names)
    found = [*differences(one, other, tolerance), *_metadata(before, after, one, other)]
    if not found and learns:
        called = observe(after, args, seed, learns, call=True, names=names)
        if list(differences(other, called, tolerance)):
            found = ["its code is not its graph: call recompile() after editing"]
    return found


def _metadata(before: fx.GraphModule, after: fx.GraphModule, one: Observation, other: Observation) -> list[str]:
    """Nodes without a fake value, or with a wrong one, where all were right before."""
    had_all = all("val" in n.meta for n in before.graph.nodes if n.op != "output")
    lacking = [n.name for n in after.graph.nodes if n.op != "output" and n.users and "val" not in n.meta]
    found = [f"node {name} has no meta['val']" for name in lacking if had_all]
    wrong_before = {node.target for node in one.wrong_values}
    wrong = {node: text for node, text in other.wrong_values.items() if node.target not in wrong_before}
    return [*found, *(f"node {node.name} {text}" for node, text in wrong.items())]


def _check_peak(name: str, before: fx.GraphModule, after: fx.GraphModule, args: Sequence[Any]) -> None:
    one, other = (_peak_bytes(module, args) for module in (before, after))
    assert other <= one, f"{name} raised the peak from {one} to {other} bytes"


def _peak_bytes(module: fx.GraphModule, args: Sequence[Any]) -> int:
    interpreter = fx.Interpreter(copy.deepcopy(module))
    mine = copy.deepcopy(tuple(args))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return measure(lambda: interpreter.run(*mine, enable_io_processing=False), "cpu").peak_bytes


def check_gradients(
    step: Callable[..., Any],
    module: nn.Module,
    args: Sequence[Any],
    reference: Callable[..., Any] | None = None,
    *,
    num_steps: int = 2,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> None:
    """Assert that `step` trains `module` as `reference` does: outputs, gradients, arguments and buffers of each step.

    `step`, `reference`: callables that stand for `module` (compiled, rewritten); `reference` defaults to the module
    itself. Values may differ by `tolerance`, relative to the largest element: 0.0 means bit by bit, which two
    compilations of one graph keep, but not a compilation and eager mode. Draws are compared by their values, so for a
    module with dropout give a `reference` that draws with the same ops. Parameters and buffers are left as they were.

    Raises AssertionError naming the step and the value.
    """
    state = {name: value.detach().clone() for name, value in module.state_dict().items()}
    runs = []
    for function in (reference or module, step):
        runs.append([_trained(function, module, args, seed + number) for number in range(num_steps)])
        module.load_state_dict(state)
        module.zero_grad()
    for number, (expected, found) in enumerate(zip(*runs, strict=True)):
        apart = sorted(expected.keys() ^ found.keys())
        assert not apart, f"step {number}: {apart} on one side only"
        wrong = [f"{n} {text}" for n in expected if (text := difference(expected[n], found[n], tolerance, False))]
        assert not wrong, "\n  ".join([f"step {number} differs:", *wrong])


def _trained(function: Callable[..., Any], module: nn.Module, args: Sequence[Any], seed: int) -> dict[str, Any]:
    """What one step shows: outputs, gradients, arguments and buffers after it."""
    mine = copy.deepcopy(tuple(args))
    module.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        outputs = compat.tree_leaves(function(*mine))
        learning = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        torch.autograd.backward(learning, [torch.ones_like(o) for o in learning])
    leaves = {f"input {i}": leaf for i, leaf in enumerate(compat.tree_leaves(mine)) if isinstance(leaf, Tensor)}
    shown: dict[str, Any] = {f"output {i}": o.detach() if isinstance(o, Tensor) else o for i, o in enumerate(outputs)}
    shown |= {name: leaf.detach() for name, leaf in leaves.items()}
    named = {**leaves, **dict(module.named_parameters())}
    shown |= {f"the gradient of {n}": t.grad for n, t in named.items() if t.is_leaf and t.grad is not None}
    shown |= {name: buffer.clone() for name, buffer in module.named_buffers()}
    return shown

