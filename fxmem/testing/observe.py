"""What running a graph once does, in full, and how two runs differ.

A run is observed on copies, so nothing of it stays; the same graph, arguments and seed give the same observation.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fxmem import compat
from fxmem.passes.base import effect_of

GRADIENT_EPS = 16
"""Gradients may differ by so many units in the last place of their largest element: autograd adds them up in the order
in which ops ran."""


@dataclass
class Observation:
    """One run. `outputs`: leaves in order, of the structure `tree`. `args`, `state`: leaves of the arguments, and the
    parameters, buffers and constants that the graph reads, after the run; `changed`: those of `state` that it wrote.
    `gradients`: of what learns, by name. `effects`: (kind, op) -> calls. `random_state`: torch's, after the run.
    `wrong_values`: node -> how its result is not what `meta["val"]` says.
    """

    tree: str
    outputs: list[Any]
    args: list[Any]
    state: dict[str, Tensor]
    changed: set[str] = field(default_factory=set)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    effects: Counter[tuple[str, str]] = field(default_factory=Counter)
    random_state: Tensor = field(default_factory=torch.get_rng_state)
    wrong_values: dict[fx.Node, str] = field(default_factory=dict)


def observe(
    module: fx.GraphModule, args: Sequence[Any], seed: int, learns: bool, call: bool = False, names: Sequence[str] = ()
) -> Observation:
    """Run `module` on a copy of `args`. `learns`: differentiate it, too. `names`: of state to look at beside its own.

    `call`: run its compiled code, and `module` itself, where otherwise its graph is interpreted, on a copy.
    """
    args = copy.deepcopy(tuple(args))
    interpreter = None if call else _Watch(copy.deepcopy(module))
    running = module if interpreter is None else interpreter.module
    state = state_of(running, names)
    before = {name: value.detach().clone() for name, value in state.items()}
    learning = {**_numbered("input", args), **state}
    with torch.random.fork_rng(devices=[]), nullcontext() if learns else torch.no_grad():
        torch.manual_seed(seed)
        result = running(*args) if interpreter is None else interpreter.run(*args, enable_io_processing=False)
        random_state = torch.get_rng_state()
        outputs, _ = compat.flatten(result)
        gradients = _gradients(outputs, learning) if learns else {}
    return Observation(
        tree=_tree(result),
        outputs=outputs,
        args=list(_numbered("input", args).values()),
        state=state,
        changed={name for name, value in before.items() if not is_same(value, state[name])},
        gradients=gradients,
        effects=interpreter.effects if interpreter else Counter(),
        random_state=random_state,
        wrong_values=interpreter.wrong_values if interpreter else {},
    )


def state_of(module: torch.nn.Module, names: Sequence[str] = ()) -> dict[str, Tensor]:
    """Parameters, buffers and tensors that the graph of `module` reads, and those called `names` that it has."""
    graph = module.graph
    assert isinstance(graph, fx.Graph)
    read = (node.target for node in graph.nodes if node.op == "get_attr")
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys([*read, *names]):
        value: Any = module
        for part in str(name).split("."):
            value = getattr(value, part, None)
        if isinstance(value, Tensor):
            found[str(name)] = value
    return found


class _Watch(fx.Interpreter):
    """Counts effects and compares every result with its fake value; with `keep`, keeps a copy of every result."""

    def __init__(self, module: fx.GraphModule, keep: bool = False) -> None:
        super().__init__(module)
        self.effects: Counter[tuple[str, str]] = Counter()
        self.wrong_values: dict[fx.Node, str] = {}
        self.kept: dict[str, list[Tensor]] | None = {} if keep else None

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        effect = effect_of(n)
        if effect in ("random", "collective"):
            self.effects[effect, str(n.target)] += 1
        if n.op != "output" and "val" in n.meta and (difference := _value_difference(n.meta["val"], result)):
            self.wrong_values[n] = difference
        if self.kept is not None and n.op == "call_function":
            self.kept[n.name] = [t.detach().clone() for t in compat.tree_leaves(result) if isinstance(t, Tensor)]
        return result


def first_difference(before: fx.GraphModule, after: fx.GraphModule, args: Sequence[Any], seed: int) -> str:
    """The first node of `after` with another value than the node of its name in `before`; "" if there is none."""
    kept = [_kept(module, args, seed) for module in (before, after)]
    for node in after.graph.nodes:
        one, other = kept[0].get(node.name), kept[1].get(node.name)
        if one is not None and other is not None and not _all_same(one, other):
            return f"\n  the first node with another value than before is {node.format_node()}"
    return ""


def _kept(module: fx.GraphModule, args: Sequence[Any], seed: int) -> dict[str, list[Tensor]]:
    watch = _Watch(copy.deepcopy(module), keep=True)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        watch.run(*copy.deepcopy(tuple(args)), enable_io_processing=False)
    assert watch.kept is not None
    return watch.kept


def _all_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(is_same, one, other))


def _numbered(kind: str, tree: Any) -> dict[str, Any]:
    return {f"{kind} {i}": leaf for i, leaf in enumerate(compat.tree_leaves(tree))}


def _gradients(outputs: Sequence[Any], learning: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Gradients of a random weighting of the outputs; {} where nothing learns, or eager autograd refuses."""
    results = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
    leaves = {n: t for n, t in learning.items() if isinstance(t, Tensor) and t.requires_grad and t.is_leaf}
    if not results or not leaves:
        return {}
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in results]
    found = torch.autograd.grad(results, list(leaves.values()), weights, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


# differences


def differences(
    before: Observation, after: Observation, tolerance: float = 0.0, with_layout: bool = True
) -> Iterator[str]:
    """Every way in which `after` is not what `before` was, in words.

    `tolerance`: of values, relative to the largest element; `with_layout`: strides and aliases count.
    """
    if before.tree != after.tree:
        yield f"outputs are {after.tree}, were {before.tree}"
        return
    for index, pair in enumerate(zip(before.outputs, after.outputs, strict=True)):
        yield from _named(f"output {index}", difference(*pair, tolerance, with_layout))
    for index, pair in enumerate(zip(before.args, after.args, strict=True)):
        yield from _named(f"input {index}, after the run,", difference(*pair, tolerance))
    for name, value in before.state.items():
        if name in after.state:
            yield from _named(f"{name}, after the run,", difference(value, after.state[name], tolerance))
        elif name in before.changed:
            yield f"{name} is not updated: the graph has lost it"
    yield from _gradient_differences(before, after, tolerance)
    if before.effects != after.effects and before.effects and after.effects:
        yield f"effects lost {dict(before.effects - after.effects)}, repeated {dict(after.effects - before.effects)}"
    if not torch.equal(before.random_state, after.random_state):
        yield "torch's random state after the run is another: a draw was added, lost, or of another size"
    if with_layout and (one := _aliases(before, after)) != (other := _aliases(after, before)):
        yield f"outputs share memory otherwise: {other}, was {one}"


def _gradient_differences(before: Observation, after: Observation, tolerance: float) -> Iterator[str]:
    for name, gradient in before.gradients.items():
        if name not in after.gradients:
            if gradient is not None:
                yield f"{name} gets no gradient any more"
            continue
        eps = torch.finfo(gradient.dtype).eps if gradient is not None else 0.0
        limit = max(tolerance, GRADIENT_EPS * eps)
        yield from _named(f"the gradient of {name}", difference(gradient, after.gradients[name], limit, False))


def _named(what: str, found: str) -> Iterator[str]:
    if found:
        yield f"{what} {found}"


def difference(before: Any, after: Any, tolerance: float = 0.0, with_layout: bool = True) -> str:
    """How `after` differs, in words; "" if it does not. Anything but tensors is compared by `==`."""
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        same = type(before) is type(after) and (before is after or bool(before == after))
        return "" if same else f"is {_brief(after)}, was {_brief(before)}"
    one, other = describe(before, with_layout), describe(after, with_layout)
    if one != other:
        return f"is {other}, was {one}"
    if before.requires_grad != after.requires_grad:
        return f"{'learns' if after.requires_grad else 'does not learn any more'} ({one})"
    if is_same(before, after):
        return ""
    wide = torch.complex128 if before.is_complex() else torch.float64
    error = (before.detach().to(wide) - after.detach().to(wide)).abs().max().item()
    largest = before.detach().to(wide).abs().max().item()
    return "" if error <= tolerance * largest else f"changed by {error:.3g} where the largest is {largest:.3g} ({one})"


def is_same(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality, up to which NaN it is."""
    one, other = one.detach(), other.detach()
    if torch.equal(one, other):
        return True
    nan = one.isnan()
    return bool(nan.any()) and torch.equal(nan, other.isnan()) and torch.equal(one[~nan], other[~nan])


def describe(tensor: Tensor, with_layout: bool = True) -> str:
    """dtype, shape, device and strides; strides of dimensions of one element, and of empty tensors, mean nothing."""
    text = f"{tensor.dtype}".removeprefix("torch.") + f"{list(tensor.shape)}"
    if tensor.device.type != "cpu":
        text += f" on {tensor.device.type}"
    if with_layout and tensor.layout == torch.strided:
        strides = [s if n > 1 and tensor.numel() else "-" for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        text += f" strides ({', '.join(map(str, strides))})"
    return text


def _value_difference(val: Any, result: Any) -> str:
    said, found = ([t for t in compat.tree_leaves(v) if isinstance(t, Tensor)] for v in (val, result))
    if len(said) != len(found):
        return f"has {len(found)} tensors, meta['val'] says {len(said)}"
    for one, other in zip(said, found, strict=True):
        if describe(one) != describe(other):
            return f"is {describe(other)}, meta['val'] says {describe(one)}"
    return ""


def _aliases(run: Observation, other: Observation) -> list[str]:
    """For each output, the first argument, state (that both runs have) or earlier output in the same memory."""
    shared = {name: run.state[name] for name in run.state if name in other.state}
    known = {f"input {i}": a for i, a in enumerate(run.args)} | shared
    owners: dict[int, str] = {}
    for name, value in known.items():
        if isinstance(value, Tensor) and value.untyped_storage().nbytes():
            owners.setdefault(compat.storage_key(value), name)
    found = []
    for index, output in enumerate(run.outputs):
        if isinstance(output, Tensor) and output.numel():
            owner = owners.setdefault(compat.storage_key(output), f"output {index}")
            if owner != f"output {index}":
                found.append(f"output {index} with {owner}")
    return found


def _tree(result: Any) -> str:
    return repr(_skeleton(result))


def _skeleton(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _skeleton(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_skeleton(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return _Leaf()


class _Leaf:
    def __repr__(self) -> str:
        return "*"


def _brief(value: Any) -> str:
    return describe(value) if isinstance(value, Tensor) else repr(value)


