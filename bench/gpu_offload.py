"""Offloading on a CUDA card: bytes moved, how much of the copying is hidden, predicted and measured peak, gradients.

    python -m bench.gpu_offload [--models gpt2,unet] [--size small] [--tiers host,disk] [--fractions 0.7,0.5] [--json]

`copy_s`: seconds of all copies of one step, `stall_s`: seconds in which compute waited for one, both from CUDA events;
`hidden_pct`: share of the copying under which compute went on. `step_s`, `unplanned_s`: seconds of a step with and
without the plan. `same_gradients`: bitwise those of the step with no budget. Without a card nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fxmem
from bench.common import Row, show
from bench.offload_models import build, gradients
from fxmem.runtime.transfers import cuda
from fxmem.testing import zoo

Pairs = list[tuple[torch.cuda.Event, torch.cuda.Event]]


@dataclass
class Timing:
    """Events around copies (on their streams) and around waits for them (on the computing stream)."""

    copies: Pairs = field(default_factory=list)
    waits: Pairs = field(default_factory=list)

    def seconds(self) -> tuple[float, float]:
        """(copying, waiting) since the last call."""
        torch.cuda.synchronize()
        found = [sum(start.elapsed_time(end) for start, end in pairs) / 1e3 for pairs in (self.copies, self.waits)]
        self.copies.clear()
        self.waits.clear()
        return found[0], found[1]


@contextmanager
def between(pairs: Pairs, stream: torch.cuda.Stream) -> Iterator[None]:
    """Events on `stream` before and after what is enqueued meanwhile."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    yield
    end.record(stream)
    pairs.append((start, end))


@contextmanager
def timed() -> Iterator[Timing]:
    """Engines that are made meanwhile take the time of their copies and waits."""
    timing, original = Timing(), cuda.CudaEngine

    class TimedEngine(original):  # type: ignore[misc, valid-type]
        def _enqueue(self, stream: torch.cuda.Stream, *args: Any) -> Any:
            stream.wait_event(torch.cuda.current_stream(self.device).record_event())  # before the clock starts
            with between(timing.copies, stream):
                return super()._enqueue(stream, *args)

        def _copy_in(self, copy: Any, ready: torch.cuda.Event, *args: Any) -> None:
            self.h2d.wait_event(ready)
            with between(timing.copies, self.h2d):
                super()._copy_in(copy, ready, *args)

        def _wait_for(self, copy: Any) -> None:
            with between(timing.waits, torch.cuda.current_stream(self.device)):
                super()._wait_for(copy)

    cuda.CudaEngine = TimedEngine  # type: ignore[misc]
    try:
        yield timing
    finally:
        cuda.CudaEngine = original  # type: ignore[misc]


def run(name: str, size: zoo.Size, tier: str, fraction: float, device: torch.device, folder: str | Path) -> Row:
    """One line of the table; on a CPU device the columns from CUDA events are 0."""
    module, args = build(name, size)
    module, args = module.to(device), tuple(arg.to(device) for arg in args)
    with timed() as timing:
        step = fxmem.compile(module, tiers=tier, offload_dir=folder, solve_s=5)
        expected = gradients(module, step, args)
        unplanned_s = _seconds(module, step, args)
        step.set_budget(fraction)
        found = gradients(module, step, args)
        step_s = _seconds(module, step, args)
        if device.type == "cuda":
            timing.seconds()
        measured = fxmem.measure(lambda: step(*args).backward()).peak_bytes
        copy_s, stall_s = timing.seconds() if device.type == "cuda" else (0.0, 0.0)
    module.zero_grad()
    plan = step.plan
    return {
        "model": name,
        "tier": tier,
        "budget_bytes": plan.budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "measured_bytes": measured,
        "moved_bytes": plan.simulation.bytes_moved,
        "copy_s": copy_s,
        "stall_s": stall_s,
        "hidden_pct": 100 * (1 - min(1.0, stall_s / copy_s)) if copy_s else 0.0,
        "unplanned_s": unplanned_s,
        "step_s": step_s,
        "same_gradients": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
    }


def _seconds(module: torch.nn.Module, step: Any, args: Sequence[Any]) -> float:
    """The fastest of three steps."""
    found = []
    for _ in range(3):
        found.append(fxmem.measure(lambda: step(*args).backward()).seconds)
        module.zero_grad()
    return min(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,resnet50,unet")
    parser.add_argument("--size", choices=["tiny", "small"], default="small")
    parser.add_argument("--tiers", default="host,disk")
    parser.add_argument("--fractions", default="0.7,0.5", help="budgets as fractions of the unplanned peak")
    parser.add_argument("--offload-dir", default=tempfile.gettempdir())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench.gpu_offload: no CUDA device here, nothing is measured", file=sys.stderr)
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    rows = (
        run(name, given.size, tier, float(fraction), device, given.offload_dir)
        for name in given.models.split(",")
        for tier in given.tiers.split(",")
        for fraction in given.fractions.split(",")
    )
    show(rows, given.json, f"offloading on {torch.cuda.get_device_name(device)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
