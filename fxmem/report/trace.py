"""A plan's simulated timeline as a Chrome trace (open it in Perfetto or chrome://tracing).

One track for each stream; on the compute stream ops lie within the modules that they belong to. One counter track has
the device's bytes by kind. Times are microseconds of simulated time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from fxmem.planners.plan import Plan
from fxmem.report.names import short_source
from fxmem.report.stacked import KINDS, Run, run_of
from fxmem.schedule import Compute, Recompute
from fxmem.schedule.simulate import Span

Event = dict[str, Any]
COMPUTE = "compute"
_MICRO = 1e6


def write_trace(plan: Plan, path: Path) -> None:
    """Write the trace of `plan` to `path`."""
    run = run_of(plan.program, plan.actions, plan.machine)
    streams = dict.fromkeys([COMPUTE, *(span.stream for span in run.result.spans)])
    track = {stream: number for number, stream in enumerate(streams)}
    events = [_named("process_name", 0, f"fxmem: {plan.program.name} by {plan.planner}, simulated")]
    events += [_named("thread_name", number, stream.replace("_", " ")) for stream, number in track.items()]
    spans = [span for span in run.result.spans if span.stream == COMPUTE]
    events += _modules(run, spans)
    events += [_op(run, span, track[span.stream]) for span in run.result.spans]
    events += _counters(run, spans)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _named(kind: str, track: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": 0, "tid": track, "args": {"name": name}}


def _slice(name: str, start_s: float, end_s: float, track: int, args: dict[str, Any]) -> Event:
    duration = (end_s - start_s) * _MICRO
    return {"ph": "X", "name": name, "ts": start_s * _MICRO, "dur": duration, "pid": 0, "tid": track, "args": args}


def _op(run: Run, span: Span, track: int) -> Event:
    action = run.actions[span.step]
    if isinstance(action, (Compute, Recompute)):
        op = run.program.ops[action.op]
        args: dict[str, Any] = {
            "op": op.target,
            "module": op.module,
            "line": short_source(op.source),
            "region": op.region,
        }
        again = isinstance(action, Recompute)
        return _slice(op.shown + "_remat" * again, span.start_s, span.end_s, track, args | {"again": again})
    storage = action.storage  # type: ignore[union-attr]  # copies are of a storage
    made = run.program.ops[run.program.producer[storage]]
    moved = {"bytes": run.program.nbytes()[storage], "module": made.module}
    return _slice(f"{type(action).__name__.lower()} {made.shown}", span.start_s, span.end_s, track, moved)


def _modules(run: Run, spans: list[Span]) -> Iterator[Event]:
    """A slice for every stretch of ops of one module, those of its parents around it."""
    open_: list[tuple[str, float]] = []
    now = 0.0
    for span in spans:
        path = _path(run, span)
        alike = len(list(takewhile(lambda pair: pair[0][0] == pair[1], zip(open_, path, strict=False))))
        yield from _closed(open_[alike:], now)
        open_ = [*open_[:alike], *((name, span.start_s) for name in path[alike:])]
        now = span.end_s
    yield from _closed(open_, now)


def _path(run: Run, span: Span) -> list[str]:
    """The region and the modules around an op, outermost first, by their full paths."""
    action = run.actions[span.step]
    assert isinstance(action, (Compute, Recompute))
    op = run.program.ops[action.op]
    region = "again" if isinstance(action, Recompute) else op.region
    parts = op.module.split(".") if op.module else []
    return [region, *(".".join(parts[: depth + 1]) for depth in range(len(parts)))]


def _closed(left: list[tuple[str, float]], now: float) -> Iterator[Event]:
    for name, start_s in left:
        yield _slice(name, start_s, now, 0, {})


def _counters(run: Run, spans: list[Span]) -> Iterator[Event]:
    for span in spans:
        counts = {kind: int(run.bytes_of[kind][span.step]) for kind in KINDS if run.bytes_of[kind].any()}
        yield {"ph": "C", "name": "bytes on the device", "ts": span.start_s * _MICRO, "pid": 0, "args": counts}
