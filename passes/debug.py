"""FXMEM_DEBUG=dir: what every pass saw and did, as text files."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import fx

from fxmem.capture import JointGraph
from fxmem.capture.joint import target_name

_BOUNDARY = "--- backward ---"


@dataclass(frozen=True)
class PassReport:
    """`num_added`: ops by target that are there more often after the pass (negative: less often)."""

    name: str
    changed: bool
    seconds: float
    num_added: Mapping[str, int]

def debug_dir() -> Path | None:
    """Folder named by FXMEM_DEBUG, created if need be; None when the switch is off."""
    name = os.environ.get("FXMEM_DEBUG")
    if not name:
        return None
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def print_graph(joint: JointGraph) -> str:
    """One line a node, in execution order, with a rule at the boundary; the same graph prints the same text."""
    return "\n".join(_lines(joint))


def is_changed(before: JointGraph, after: JointGraph) -> bool:
    """Do the two print otherwise?"""
    return before is not after and any(a != b for a, b in itertools.zip_longest(_lines(before), _lines(after)))


def dump_pass(position: int, name: str, before: JointGraph, after: JointGraph, report: PassReport) -> None:
    """Write <graph>-<position>-<pass>.{before,after}.txt and .json (changed, seconds, op-count diff)."""
    folder = debug_dir()
    if folder is None:
        return
    stem = f"{before.fingerprint}-{position:02d}-{name}"
    (folder / f"{stem}.before.txt").write_text(print_graph(before) + "\n")
    (folder / f"{stem}.after.txt").write_text(print_graph(after) + "\n")
    (folder / f"{stem}.json").write_text(json.dumps({**asdict(report)}, indent=1) + "\n")


def _lines(joint: JointGraph) -> Iterator[str]:
    for position, node in enumerate(joint.nodes):
        if position == joint.num_forward_nodes:
            yield _BOUNDARY
        yield _line(node)
    if joint.num_forward_nodes == len(joint.nodes):
        yield _BOUNDARY
    results = [str(r) for r in joint.outputs]
    forward, backward = results[: joint.num_forward_outputs], results[joint.num_forward_outputs :]
    yield f"return ({', '.join(forward)}), ({', '.join(backward)})"


def _line(node: fx.Node) -> str:
    if node.op in ("placeholder", "get_attr"):
        return f"%{node.name} = {node.op}"
    arguments = [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    return f"%{node.name} = {target_name(node)}({', '.join(arguments)})"
