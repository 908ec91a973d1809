"""Random torch.fx graphs of ATen ops: traced from drawn modules, put together node by node, or joint graphs.

Each carries its arguments in `graph_module.meta[EXAMPLE_ARGS]` and a fake value in every `node.meta["val"]`, and prints
as the Python that makes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from fxmem import compat
from fxmem.capture import JointGraph, capture
from fxmem.errors import VerifyError
from fxmem.testing.random_modules import DrawnModule, compile_source, modules, run_source

EXAMPLE_ARGS = "example_args"
"""Key in `GraphModule.meta`: the tuple of arguments a drawn graph is run with."""


def graph_modules(
    num_ops: tuple[int, int] = (1, 8), without: Collection[str] = ()
) -> st.SearchStrategy[fx.GraphModule]:
    """Random GraphModules of ATen ops, half of them traced from `modules(num_ops, without)`, half put together.

    Those put together have what a trace hardly has: dead and repeated nodes, results of several outputs of which some
    are unused, keyword arguments, in-place ops through views, updates of buffers, arguments returned as they came,
    nested outputs. Neither kind is functional: ops may write in place, draw random numbers, and alias.
    """
    return st.one_of(constructed_graphs((num_ops[0], 2 * num_ops[1])), traced_graphs(num_ops, without))


@st.composite
def traced_graphs(draw: st.DrawFn, num_ops: tuple[int, int] = (1, 8), without: Collection[str] = ()) -> fx.GraphModule:
    """What `make_fx` records of a drawn module's forward: parameters and buffers are attributes."""
    return graph_module(draw(modules(num_ops, without)).source + _TRACE)


@st.composite
def constructed_graphs(draw: st.DrawFn, num_ops: tuple[int, int] = (1, 16)) -> fx.GraphModule:
    """Graphs written node by node."""
    builder = _GraphBuilder(draw)
    for _ in range(draw(st.integers(*num_ops))):
        builder.add(*draw(st.sampled_from(builder.applicable())))
    return graph_module(builder.finish())


@st.composite
def joint_graphs(draw: st.DrawFn, num_ops: tuple[int, int] = (1, 8), without: Collection[str] = ()) -> JointGraph:
    """The joint graph (forward and backward) that fxmem captures of a drawn module: what a `GraphPass` takes."""
    return joint_graph(draw(modules(num_ops, without)))


def graph_module(source: str) -> fx.GraphModule:
    """The `graph_module` that `source` defines, with its `args` as example arguments and fake values in its nodes."""
    names = run_source(compile_source(source))
    module: fx.GraphModule = names["graph_module"]
    annotate(module, names["args"])
    module.meta[EXAMPLE_ARGS] = names["args"]
    _print_as(module, f"graph_module(r'''{source}''')")
    return module


def joint_graph(drawn: DrawnModule) -> JointGraph:
    """The joint graph of a drawn module with example arguments: its own for forward, random tangents for backward."""
    module, args = drawn.build()
    (joint,) = capture(module, args, frontend="aot")
    result = replace(joint, graph_module=joint.graph_module)
    result.graph_module.meta[EXAMPLE_ARGS] = joint_args(result, module, args)
    _print_as(result.graph_module, f"joint_graph({drawn!r})")
    return result


def joint_args(joint: JointGraph, module: torch.nn.Module, args: Sequence[Any], seed: int = 0) -> tuple[Any, ...]:
    """Values for the placeholders of `joint`: parameters and buffers by name, then `args`, then random tangents."""
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    plain = iter(leaf for leaf in compat.tree_leaves(args) if isinstance(leaf, Tensor))
    generator = torch.Generator().manual_seed(seed)
    tangents = set(joint.tangents)
    values: list[Any] = []
    for node in joint.graph_module.graph.find_nodes(op="placeholder"):
        if node.name in tangents:
            values.append(_random_like(node.meta["val"], generator))
        else:
            found = named[joint.names[node.name]] if node.name in joint.names else next(plain)
            values.append(found.detach())
        if values[-1].shape != node.meta["val"].shape:
            raise VerifyError(f"{node.name} of the graph is no argument of the module: {tuple(values[-1].shape)}")
    return tuple(values)


def _random_like(val: Tensor, generator: torch.Generator) -> Tensor:
    """Strided as `val`."""
    made = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
    return made.copy_(torch.randn(val.shape, generator=generator))


def annotate(module: fx.GraphModule, args: Sequence[Any]) -> None:
    """Set `meta["val"]` of every node to its fake value; nothing is computed, and aliases are seen as such."""
    with torch.no_grad():
        _Annotation(module).run(*args)


class _Annotation(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.mode = compat.FakeTensorMode(allow_non_fake_inputs=True)

    def run_node(self, n: fx.Node) -> Any:
        with self.mode:
            result = super().run_node(n)
        if n.op in ("placeholder", "get_attr"):
            result = compat.tree_map_only(Tensor, self.mode.from_tensor, result)
        if n.op != "output":
            n.meta["val"] = result
        return result


def _print_as(module: fx.GraphModule, text: str) -> None:
    """`repr(module)` from now on; every GraphModule has a class of its own, and copies of it print as usual."""
    cls: Any = type(module)
    cls.__repr__ = lambda self: text
    cls._repr_pretty_ = lambda self, printer, cycle: printer.text(text)


_TRACE = """
from torch.fx.experimental.proxy_tensor import make_fx

graph_module = make_fx(module)(*args)
"""
_HEAD = """
import operator

import torch
from torch import fx

aten = torch.ops.aten
torch.manual_seed({seed})
args = ({args})
root, graph = torch.nn.Module(), fx.Graph()
"""
_TAIL = "graph_module = fx.GraphModule(root, graph)\n"

Where = Callable[[Tensor], bool]
_GraphRule = tuple[Where, str]


def _any(t: Tensor) -> bool:
    return True


def _vector(t: Tensor) -> bool:
    return t.ndim >= 1 and t.numel() > 0


def _matrix(t: Tensor) -> bool:
    return t.ndim == 2 and t.numel() > 0


# {v}: a value; {u}: one of the same shape; {t}: a new name. A line may hold several statements.
_GRAPH_RULES: list[_GraphRule] = [
    *((_any, f"{{t}} = graph.call_function(aten.{call})") for call in (
        "tanh.default, ({v},)", "sigmoid.default, ({v},)", "mul.Tensor, ({v}, 2.0)", "add.Tensor, ({v}, 1)",
        "relu.default, ({v},)", "mul.Tensor, ({v}, {u})", "add.Tensor, ({v}, {u})",
        "sub.Tensor, ({v}, {u}), dict(alpha=2)",
        "sum.default, ({v},)", "clone.default, ({v},)", "alias.default, ({v},)", "detach.default, ({v},)",
        "rand_like.default, ({v},)", "bernoulli.p, (graph.call_function(aten.detach.default, ({v},)), 0.5)",
        "where.self, (graph.call_function(aten.gt.Scalar, ({v}, 0)), {v}, {u})",
    )),
    *((_vector, f"{{t}} = graph.call_function(aten.{call})") for call in (
        "slice.Tensor, ({v}, -1, 0, 1)", "select.int, ({v}, 0, 0)", "unsqueeze.default, ({v}, 0)",
        "_softmax.default, ({v}, -1, False)",
        "sum.dim_IntList, ({v}, [-1], True)", "cat.default, ([{v}, {u}], -1)", "mean.dim, ({v}, [0])",
        "flip.default, ({v}, [0])",
    )),
    *((_matrix, f"{{t}} = graph.call_function(aten.{call})") for call in (
        "t.default, ({v},)", "transpose.int, ({v}, 0, 1)", "permute.default, ({v}, [1, 0])",
        "mm.default, ({v}, graph.call_function(aten.t.default, ({v},)))",
        "clone.default, ({v},), dict(memory_format=torch.contiguous_format)", "expand.default, ({v}, [2, -1, -1])",
    )),
    (_any, "{t}_both = graph.call_function(aten.native_dropout.default, ({v}, 0.5, True))\n"
           "{t} = graph.call_function(operator.getitem, ({t}_both, 0))"),
    (_vector, "{t}_both = graph.call_function(aten.topk.default, ({v}, 1))\n"
              "{t} = graph.call_function(operator.getitem, ({t}_both, 0))"),
    (lambda t: _matrix(t) and t.shape[1] >= 2,
     "{t}_parts = graph.call_function(aten.split.Tensor, ({v}, 1, 1))\n"
     "{t} = graph.call_function(operator.getitem, ({t}_parts, 1))"),
    (_any, "{t} = graph.call_function(aten.add.Tensor, ({v}, 0.5))\ngraph.call_function(aten.mul_.Tensor, ({t}, 3))"),
    (_any, "{t} = graph.call_function(aten.clone.default, ({v},))\ngraph.call_function(aten.add_.Tensor, ({t}, {u}))"),
    (_any, "{t} = graph.call_function(aten.zeros_like.default, ({v},))\n"
           "graph.call_function(aten.copy_.default, ({t}, {v}))"),
    (_vector, "{t} = graph.call_function(aten.mul.Tensor, ({v}, 1.5))\n"
              "{t}_view = graph.call_function(aten.select.int, ({t}, 0, 0))\n"
              "graph.call_function(aten.add_.Tensor, ({t}_view, 1))"),
    (_any, "{t} = graph.call_function(aten.tanh.default, ({v},))\n"
           "{t}_again = graph.call_function(aten.tanh.default, ({v},))"),
]
_ATTRIBUTE_RULES: list[_GraphRule] = [
    (_any, "root.{t}_w = torch.nn.Parameter(torch.randn({shape}))\n"
           "{t} = graph.call_function(aten.mul.Tensor, ({v}, graph.get_attr('{t}_w')))"),
    (_any, "root.register_buffer('{t}_b', torch.ones({shape}))\n{t}_b = graph.get_attr('{t}_b')\n"
           "{t} = graph.call_function(aten.mul.Tensor, ({v}, graph.call_function(aten.sin.default, ({t}_b,))))\n"
           "graph.call_function(aten.add_.Tensor, ({t}_b, 1))"),
]  # fmt: skip


class _GraphBuilder:
    """Writes the statements of a graph, running each on meta tensors in place of nodes."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.lines: list[str] = []
        self.values: dict[str, Tensor] = {}
        self.root = torch.nn.Module()
        self.names: dict[str, Any] = {
            "torch": torch, "aten": torch.ops.aten, "operator": operator, "root": self.root, "graph": _Eager(self.root),
        }  # fmt: skip
        self.arguments: list[str] = []
        for index in range(draw(st.integers(1, 2))):
            self._argument(f"x{index}")

    def _argument(self, name: str) -> None:
        shape = self.draw(st.sampled_from(["3, 4", "4, 2", "4", "2, 3, 2", "()"]))
        grad = self.draw(st.sampled_from(["", ".requires_grad_()"]))
        turn = ".t()" if shape == "4, 2" else ""
        self.arguments.append(f"torch.randn({shape}){turn}{grad}")
        self.values[name] = self.names[name] = torch.empty(eval(f"torch.empty({shape}){turn}").shape, device="meta")
        self.lines.append(f"{name} = graph.placeholder('{name}')")

    def applicable(self) -> list[_GraphRule]:
        return [rule for rule in (*_GRAPH_RULES, *_ATTRIBUTE_RULES) if self._fitting(rule[0])]

    def _fitting(self, where: Where) -> list[str]:
        fits = [n for n, t in self.values.items() if t.dtype == torch.float32 and t.numel() <= 256 and where(t)]
        return fits[::-1]

    def add(self, where: Where, text: str) -> None:
        v = self.draw(st.sampled_from(self._fitting(where)))
        shape = self.values[v].shape
        u = self.draw(st.sampled_from(self._fitting(lambda t: t.shape == shape)))
        name = f"v{len(self.values)}"
        for line in text.format(t=name, v=v, u=u, shape=tuple(shape)).split("\n"):
            self.lines.append(line)
            with torch.device("meta"):
                exec(line, self.names)
        self.values[name] = self.names[name]

    def finish(self) -> str:
        newest = list(self.values)[-1]
        others = ", ".join(self.draw(st.lists(st.sampled_from(list(self.values)), max_size=2)))
        plain = f"({newest},)", newest, f"({newest}, {others})"
        nested = f"[{newest}, [{others}]]", f"dict(a={newest}, b=[{others}])", f"[None, {newest}]"
        lines = [*self.lines, f"graph.output({self.draw(st.sampled_from([*plain, *nested]))})"]
        head = _HEAD.format(seed=self.draw(st.integers(0, 9)), args=", ".join(self.arguments) + ",")
        return f"{head}{chr(10).join(lines)}\n{_TAIL}"


class _Eager:
    """Stands for a graph: calls happen at once."""

    def __init__(self, root: torch.nn.Module) -> None:
        self.root = root

    def call_function(self, target: Any, args: Any = (), kwargs: Any = None) -> Any:
        return target(*args, **(kwargs or {}))

    def get_attr(self, name: str) -> Any:
        return getattr(self.root, name).detach()
