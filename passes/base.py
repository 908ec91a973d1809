"""The pass contract, stated once, and the manager that enforces it between passes.

A pass takes a joint graph and returns another one; it never edits its argument. Around every pass the manager checks:

- the graph lints, nodes stand in execution order and every node carries its fake value;
- `requires` hold before it, `ensures` after it (names in `CHECKS`);
- outputs are the same in number, shape and dtype;
- effects are kept: each random, mutating or collective op of the graph still runs exactly once; a random op may be
  replayed, that is run from the state it drew from, which draws nothing anew (`fxmem.capture.draws`). A pass that
  ensures "accumulators" may also write, part by part, into tensors that the graph itself makes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from fxmem.capture import JointGraph
from fxmem.capture.draws import RNG_STATE, replay, state_name
from fxmem.capture.effects import is_collective, is_random
from fxmem.capture.notes import notes
from fxmem.errors import VerifyError
from fxmem.passes import debug
from fxmem.passes.accumulators import verify_accumulators, writes_own
from fxmem.passes.debug import PassReport
from fxmem.passes.emit import region_of
from fxmem.passes.offload import verify_offload


@dataclass(frozen=True)
class GraphPass(ABC):
    """A step from joint graph to joint graph. Subclasses are frozen dataclasses whose fields are their options."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]] = frozenset()
    ensures: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def apply(self, joint: JointGraph) -> JointGraph:
        """Return the rewritten graph, or `joint` itself when there is nothing to do."""


@dataclass(frozen=True)
class PassResult:
    """The graph after all passes, and what each did."""

    joint: JointGraph
    reports: tuple[PassReport, ...]

    @property
    def changed(self) -> bool:
        return any(report.changed for report in self.reports)


def run_passes(joint: JointGraph, passes: Sequence[GraphPass]) -> PassResult:
    """Apply `passes` in turn under the contract above. Raises VerifyError naming the pass and the node that breaks it.

    With FXMEM_DEBUG=dir set, writes there the graph before and after each pass, the op-count diff and the seconds.
    """
    reports: list[PassReport] = []
    for position, graph_pass in enumerate(passes):
        before = joint
        _verify(graph_pass, "before", before, graph_pass.requires)
        started = time.perf_counter()
        joint = graph_pass.apply(before)
        seconds = time.perf_counter() - started
        _verify(graph_pass, "after", joint, graph_pass.ensures)
        _verify_kept(graph_pass, before, joint)
        difference = Counter(_targets(joint))
        difference.subtract(_targets(before))
        report = PassReport(
            name=graph_pass.name,
            changed=debug.is_changed(before, joint),
            seconds=seconds,
            num_added={target: n for target, n in sorted(difference.items()) if n},
        )
        debug.dump_pass(position, report.name, before, joint, report)
        reports.append(report)
    return PassResult(joint, tuple(reports))


def verify_lint(joint: JointGraph) -> None:
    """Lint; forward nodes stand before backward ones and read none of them; flat output list."""
    joint.graph_module.graph.lint()
    nodes = joint.nodes
    if not 0 <= joint.num_forward_nodes <= len(nodes):
        raise VerifyError(f"the boundary is after node {joint.num_forward_nodes}, but there are {len(nodes)}")
    if not joint.num_forward_outputs <= len(joint.outputs):
        raise VerifyError(f"{joint.num_forward_outputs} forward outputs, but the graph returns {len(joint.outputs)}")
    forward = set(nodes[: joint.num_forward_nodes])
    for result in joint.outputs[: joint.num_forward_outputs]:
        if isinstance(result, fx.Node) and result not in forward:
            raise VerifyError(f"forward output {result.name} is computed in backward")


def verify_metadata(joint: JointGraph) -> None:
    """Every node that is read has its fake value."""
    for node in joint.nodes:
        if "val" not in node.meta and (node.users or node.op == "placeholder"):
            raise VerifyError(f"node {node.name} ({node.target}) has no meta['val']")


def verify_regions(joint: JointGraph) -> None:
    """Every node says which region it runs in, and the boundary is where the regions meet."""
    for position, node in enumerate(joint.nodes):
        expected = "forward" if position < joint.num_forward_nodes else "backward"
        if region_of(node) != expected:
            raise VerifyError(f"node {node.name} says region {region_of(node)}, it stands in {expected}")


def verify_recompute(joint: JointGraph) -> None:
    """What runs again is named in the graph before it and has no effects; what is replayed has its own state."""
    seen: set[str] = set()
    states = _states(joint)
    for node in joint.nodes:
        origin = notes(node).get("recompute_of")
        if origin is not None and origin not in seen:
            raise VerifyError(f"node {node.name} recomputes {origin}, which did not run before")
        if origin is not None and effect_of(node) is not None:
            raise VerifyError(f"node {node.name} repeats a {effect_of(node)} op")
        if node.target is replay and (origin is None or node.args[0] is not states.get(origin)):
            raise VerifyError(f"node {node.name} replays {origin}, but not from the state that it drew from")
        seen.add(node.name)


def _states(joint: JointGraph) -> dict[str, fx.Node]:
    """Random op -> the node that read its state, where nothing was drawn between the two."""
    found: dict[str, fx.Node] = {}
    state: fx.Node | None = None
    for node in joint.nodes:
        if node.target is RNG_STATE:
            state = node
        elif effect_of(node) == "random":
            if state is not None and state.name == state_name(node):
                found[node.name] = state
            state = None
    return found


CHECKS: Mapping[str, Callable[[JointGraph], None]] = {
    "lint": verify_lint,
    "metadata": verify_metadata,
    "regions": verify_regions,
    "recompute": verify_recompute,
    "offload": verify_offload,
    "accumulators": verify_accumulators,
}
_ALWAYS = frozenset({"lint", "metadata"})


def effect_of(node: fx.Node) -> str | None:
    """'random', 'mutating', 'collective', or None for an op that may run any number of times."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") == "fxmem":
        return None
    if is_random(node):
        return "random"
    if is_collective(node):
        return "collective"
    schema = getattr(node.target, "_schema", None)
    return "mutating" if schema is not None and schema.is_mutable else None


def _verify(graph_pass: GraphPass, when: str, joint: JointGraph, names: frozenset[str]) -> None:
    unknown = sorted(names - CHECKS.keys())
    if unknown:
        raise VerifyError(f"pass {graph_pass.name} names unknown checks {unknown}; there are {sorted(CHECKS)}")
    for name in sorted(_ALWAYS | names, key=list(CHECKS).index):
        try:
            CHECKS[name](joint)
        except (VerifyError, RuntimeError) as error:
            raise VerifyError(f"{when} pass {graph_pass.name}, check {name}: {error}") from error


def _verify_kept(graph_pass: GraphPass, before: JointGraph, after: JointGraph) -> None:
    expected, found = _signature(before), _signature(after)
    if expected != found:
        where = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), None)
        detail = "" if where is None else f": output {where} was {expected[where]}, is {found[where]}"
        raise VerifyError(f"pass {graph_pass.name} changed {len(expected)} outputs to {len(found)}{detail}")
    accumulates = "accumulators" in graph_pass.ensures
    lost = _effects(before, accumulates) - _effects(after, accumulates)
    added = _effects(after, accumulates) - _effects(before, accumulates)
    if lost or added:
        raise VerifyError(f"pass {graph_pass.name}: effects lost {dict(lost)}, repeated {dict(added)}")


def _signature(joint: JointGraph) -> list[str]:
    return [_describe(r.meta.get("val")) if isinstance(r, fx.Node) else repr(r) for r in joint.outputs]


def _describe(value: Any) -> str:
    """Text, because comparing symbolic sizes would add guards."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return type(value).__name__


def _effects(joint: JointGraph, accumulates: bool) -> Counter[tuple[str, str]]:
    """Effects by op; not writes into tensors that the graph makes, where these are verified by themselves."""
    own = writes_own(joint) if accumulates else ()
    effects = ((effect_of(node), str(node.target)) for node in joint.nodes if node not in own)
    return Counter((effect, target) for effect, target in effects if effect is not None)


def _targets(joint: JointGraph) -> list[str]:
    return [str(node.target) for node in joint.nodes if node.op == "call_function"]
