"""A plan's simulated timeline as a Chrome trace (open it in Perfetto or chrome://tracing)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxmem.planners.plan import Plan
from fxmem.schedule import Compute, Recompute


def write_trace(plan: Plan, path: Path) -> None:
    """Write spans of every stream and a counter of device bytes; times in microseconds of simulated time."""
    result = plan.simulation
    events: list[dict[str, Any]] = []
    for span in result.spans:
        action = plan.actions[span.step]
        name = str(action)
        if isinstance(action, (Compute, Recompute)):
            name = plan.program.ops[action.op].name + ("_remat" if isinstance(action, Recompute) else "")
            count = {"bytes": int(result.bytes_at[span.step])}
            events.append({"ph": "C", "name": "device", "ts": span.start_s * 1e6, "pid": 0, "args": count})
        duration_us = (span.end_s - span.start_s) * 1e6
        events.append(
            {"ph": "X", "name": name, "ts": span.start_s * 1e6, "dur": duration_us, "pid": 0, "tid": span.stream}
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
