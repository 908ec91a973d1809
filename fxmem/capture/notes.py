"""What passes note on the nodes that they make."""

from __future__ import annotations

from typing import Any

from torch import fx

META = "fxmem"
"""Key in `node.meta`: {"region": "forward" | "backward"}, plus "recompute_of": name for a node that runs again, plus
"derived_from": name for a view that was made again from its base, plus "part_of": name, "part": number, "parts": how
many, "fission": which region of the graph, for a node that serves one part of a captured one, plus "fused": the region
that one was captured in, if the gradients of parts are made in forward."""


def notes(node: fx.Node) -> dict[str, Any]:
    """What is noted on `node`; nothing on a captured one."""
    found: dict[str, Any] = node.meta.get(META, {})
    return found
