"""`JointGraph`: one captured graph, in a normal form.

Nodes stand in the order: forward inputs, constants, forward ops, in-place updates of inputs, tangents, backward ops,
output. AOTAutograd leaves tangents before the forward ops and updates after the backward ones; here the order is the
order of execution, so that the position of a node is the index of its op in a Program. Right before a random op that
may be replayed stands the node that reads the state it draws from.
"""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from fxmem import compat
from fxmem.capture.draws import save_states
from fxmem.capture.duplicates import merge_duplicates
from fxmem.capture.errors import user_frame
from fxmem.capture.overwritten import ancestors, overwritten_inputs, save_overwritten
from fxmem.errors import CaptureError


@dataclass(frozen=True)
class JointGraph:
    """Forward and backward of one graph; every node carries ``meta["val"]`` (FakeTensor, SymInt or a tuple).

    The output node returns a flat list: `num_forward_outputs` values of forward, then one gradient (or None) for each
    forward input. `num_forward_nodes`: nodes before the first that runs in backward. `static_inputs`: placeholders of
    parameters and buffers; `names`: placeholder -> fully qualified name in the module
    (of a tied parameter: the one by which forward first reaches it); `mutated_inputs`: placeholders
    whose storage is overwritten at the end of forward, by an op of the graph or by the runtime wrapper;
    `sources`: node -> 'file:line: code' of the model.
    """

    graph_module: fx.GraphModule
    num_forward_outputs: int
    num_forward_nodes: int
    static_inputs: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    mutated_inputs: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes but the output, in execution order."""
        return [n for n in self.graph_module.graph.nodes if n.op != "output"]

    @property
    def tangents(self) -> tuple[str, ...]:
        """Placeholders of the incoming gradients of the forward outputs."""
        return tuple(n.name for n in self.nodes[self.num_forward_nodes :] if n.op == "placeholder")

    @property
    def static_indices(self) -> tuple[int, ...]:
        """Positions of `static_inputs` among the forward inputs."""
        inputs = [n.name for n in self.nodes[: self.num_forward_nodes] if n.op == "placeholder"]
        return tuple(inputs.index(name) for name in self.static_inputs)

    @property
    def has_backward(self) -> bool:
        return self.num_forward_nodes < len(self.nodes)

    @property
    def outputs(self) -> tuple[Any, ...]:
        """What the output node returns: nodes, None, or constants."""
        (node,) = self.graph_module.graph.find_nodes(op="output")
        return tuple(node.args[0])

    @cached_property
    def derived(self) -> dict[Any, JointGraph]:
        """Graphs made of this one, by what made them: kept with it."""
        return {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of structure, shapes, strides, dtypes and device types; not of names: equal iff a plan applies."""
        digest = hashlib.sha256()
        index: dict[fx.Node, int] = {}
        for node in self.graph_module.graph.nodes:
            index[node] = len(index)
            args = fx.map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")
            target = "" if node.op in ("placeholder", "get_attr") else target_name(node)
            digest.update(f"{node.op} {target} {args} {_describe(node.meta.get('val'))}\n".encode())
        digest.update(f"{self.num_forward_outputs} {self.num_forward_nodes}".encode())
        return digest.hexdigest()[:16]


def from_aot(
    joint: fx.GraphModule,
    num_forward_outputs: int,
    static_indices: Iterable[int] = (),
    input_sources: Sequence[str] = (),
    replays: bool = True,
) -> JointGraph:
    """Normal form of AOTAutograd's joint graph, duplicates merged (the caller's graph is rewritten in place).

    `static_indices`: positions of parameters and buffers among the forward inputs. `input_sources`: Dynamo's source
    of each graph input. `replays`: whoever runs the graph runs its nodes in order, so that random ops can be replayed
    (`fxmem.capture.draws`).
    """
    _complete_values(joint)
    _own_tangents(joint.graph)
    _restore_aliases(joint.graph)
    _order_by_execution(joint.graph, num_forward_outputs)
    merge_duplicates(joint.graph)
    placeholders = joint.graph.find_nodes(op="placeholder")
    inputs = [n for n in placeholders if not is_tangent(n)]
    forward = _order_by_execution(joint.graph, num_forward_outputs)
    mutated = overwritten_inputs(joint.graph, inputs, forward)
    num_added = save_overwritten(joint.graph, mutated, forward) if mutated else 0
    if replays and len(inputs) < len(placeholders):
        num_added += save_states(joint.graph, forward)
    joint.graph.lint()
    joint.recompile()
    static = [inputs[i] for i in static_indices if i < len(inputs)]
    return JointGraph(
        graph_module=joint,
        num_forward_outputs=num_forward_outputs,
        num_forward_nodes=len(forward) + num_added,
        static_inputs=tuple(n.name for n in static),
        names=_qualified_names(static, input_sources),
        mutated_inputs=tuple(n.name for n in mutated),
        sources=dict(_sources(joint.graph)),
    )


def is_tangent(node: fx.Node) -> bool:
    """Is this placeholder the gradient of a forward output?"""
    return node.op == "placeholder" and (
        isinstance(node.meta.get("desc"), compat.TangentAOTInput) or node.name.startswith("tangents_")
    )


def _complete_values(module: fx.GraphModule) -> None:
    """Give a value to nodes that the tracer leaves without: a branch or loop body is a graph, an assertion is None."""
    for node in module.graph.nodes:
        if "val" in node.meta:
            continue
        if node.op == "get_attr":
            attribute = operator.attrgetter(node.target)(module)
            node.meta |= {"val": attribute} if isinstance(attribute, fx.GraphModule) else {}
        elif isinstance(node.target, compat.OpOverload) and not node.target._schema.returns:
            node.meta["val"] = None


def _own_tangents(graph: fx.Graph) -> None:
    """Give every tangent a storage of its own: that of an output which is a view of an input is traced as a view."""
    seen: set[int] = set()
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if not isinstance(value, compat.FakeTensor) or value.layout != torch.strided:
            continue
        if is_tangent(node) and compat.storage_key(value) in seen:
            node.meta["val"] = value = compat.fake_empty(
                value.fake_mode, value.shape, value.stride(), value.dtype, value.device
            )
        seen.add(compat.storage_key(value))


def _restore_aliases(graph: fx.Graph) -> None:
    """Let values of views share their base's storage: those of nodes that inductor's patterns wrote own theirs."""
    for node in graph.nodes:
        base = node.args[0] if node.args and is_view(node) else None
        values = [n.meta.get("val") for n in (base, node) if isinstance(n, fx.Node)]
        fakes = [value for value in values if isinstance(value, compat.FakeTensor)]
        if len(fakes) == len(values) and len(set(map(compat.storage_key, fakes))) > 1:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with node.meta["val"].fake_mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)


def is_view(node: fx.Node) -> bool:
    """Does the op return a view of its first argument, by its own schema?"""
    returns = node.target._schema.returns if isinstance(node.target, compat.OpOverload) else ()
    return len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _order_by_execution(graph: fx.Graph, num_forward_outputs: int) -> list[fx.Node]:
    """Reorder (see the module's docstring); returns the nodes before the first of backward."""
    nodes = [n for n in graph.nodes if n.op != "output"]
    inputs = [n for n in nodes if n.op == "placeholder" and not is_tangent(n)]
    constants = [n for n in nodes if n.op == "get_attr"]
    tangents = [n for n in nodes if is_tangent(n)]
    calls = [n for n in nodes if n.op not in ("placeholder", "get_attr")]
    updates = [n for n in calls if n.meta.get("partitioner_tag") == "must_be_in_forward"]
    ops = [n for n in calls if n not in set(updates)]
    last = max((i for i, n in enumerate(ops) if n.meta.get("partitioner_tag") == "is_forward"), default=-1)
    if not tangents:
        last = len(ops) - 1
    results: Any = graph.output_node().args[0]
    returned = [n for n in results[:num_forward_outputs] if isinstance(n, fx.Node)]
    needed = ancestors([*returned, *updates])  # what is returned detached, or after its backward's ops, has no tag
    late = [n for n in ops[last + 1 :] if n in needed]
    forward = [*inputs, *constants, *ops[: last + 1], *late, *updates]
    _move(graph, [*forward, *tangents, *(n for n in ops[last + 1 :] if n not in needed)])
    return forward


def _move(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    (output,) = graph.find_nodes(op="output")
    for node in order:
        output.prepend(node)


_MODULE_STEP = re.compile(r"_modules\[['\"]([^'\"]+)['\"]\]|_(?:parameters|buffers)\[['\"]([^'\"]+)['\"]\]|\.(\w+)$")


def _qualified_names(static: Sequence[fx.Node], input_sources: Sequence[str]) -> dict[str, str]:
    """placeholder -> name in the module; prefixed by the root expression only if there are several roots."""
    found: dict[str, tuple[str, str]] = {}
    for node in static:
        desc = node.meta.get("desc")
        if isinstance(desc, (compat.ParamAOTInput, compat.BufferAOTInput)):
            found[node.name] = ("", desc.target)
        elif isinstance(desc, compat.PlainAOTInput) and desc.idx < len(input_sources) and input_sources[desc.idx]:
            found[node.name] = _split_source(input_sources[desc.idx])
    several = len({root for root, _ in found.values()}) > 1
    return {name: f"{root}.{path}" if several else path for name, (root, path) in found.items()}


def _split_source(source: str) -> tuple[str, str]:
    """``L['self']._modules['a']._parameters['w']`` -> ("self", "a.w")."""
    steps = [next(filter(None, groups)) for groups in _MODULE_STEP.findall(source)]
    root = re.match(r"[LG]\['(\w+)'\]", source)
    return root[1] if root else "", ".".join(steps) or source


def _sources(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        frame = user_frame(node.meta.get("stack_trace"))
        if frame is not None:
            yield node.name, frame


def target_name(node: fx.Node) -> str:
    """The op's name: 'aten.mm.default'; for Python functions 'getitem', 'mul'; for inputs their own."""
    if node.op != "call_function" or isinstance(node.target, compat.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = value.stride() if value.layout == torch.strided else value.layout
        return f"{value.dtype} {value.device.type} {tuple(value.shape)} {layout}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_describe, value))})"
    return value.code if isinstance(value, fx.GraphModule) else str(value)


def require_tensors(joint: JointGraph) -> None:
    """Raise CaptureError if a node lacks its fake value: without sizes there is no plan."""
    for node in joint.nodes:
        if "val" not in node.meta and node.op == "call_function":
            raise CaptureError(f"op {node.name} ({node.target}) has no known shape", joint.sources.get(node.name))
