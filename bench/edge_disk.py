"""Train under a real memory limit: a step whose saved tensors exceed 1 GiB, with the disk tier and without.

    python -m bench.edge_disk [--limit-gib 1.0] [--budget 900MiB] [--offload-dir DIR] [--json]

Each run is a process of its own whose private memory is limited (RLIMIT_DATA, beyond what it has when the model is
there). Rows: tiers, whether it trained, peak resident bytes beyond the start, seconds of the second step, the error.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fxmem
from bench.common import Row, show

WIDTH, ROWS, LAYERS = 512, 32768, 12
"""One saved tensor of a layer has 64 MiB; two a layer make 1.5 GiB. Parameters have 12 MiB."""


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)).sin()
        return x.square().mean()


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def train(tiers: str | None, budget: str, limit_bytes: int, offload_dir: str | None) -> Row:
    """Two steps under the limit; what happened."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(ROWS, WIDTH)
    model(x[:2]).backward()  # the libraries' own memory comes first
    model.zero_grad()
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stacks
    start_bytes = resident_bytes("VmRSS")
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, used + limit_bytes))
    row: Row = {"tiers": tiers or "none", "trained": False, "peak_bytes": 0, "step_s": 0.0, "error": ""}
    try:
        step = fxmem.compile(model, budget=budget, tiers=tiers, offload_dir=offload_dir) if tiers else model
        for _ in range(2):
            model.zero_grad()
            begin = time.perf_counter()
            step(x).backward()
            row["step_s"] = time.perf_counter() - begin
        row["trained"] = all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    except (RuntimeError, MemoryError, fxmem.FxmemError) as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    row["peak_bytes"] = resident_bytes("VmHWM") - start_bytes
    return row


def in_a_process(tiers: str | None, arguments: argparse.Namespace) -> Row:
    command = [sys.executable, "-m", "bench.edge_disk", "--run", tiers or "none", "--budget", arguments.budget]
    command += ["--limit-gib", str(arguments.limit_gib)]
    command += ["--offload-dir", arguments.offload_dir] if arguments.offload_dir else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1][:120]
        return {"tiers": tiers or "none", "trained": False, "peak_bytes": 0, "step_s": 0.0, "error": reason}
    row: Row = json.loads(lines[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-gib", type=float, default=1.0)
    parser.add_argument("--budget", default="900MiB")
    parser.add_argument("--offload-dir")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", choices=["none", "disk"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        tiers = None if arguments.run == "none" else arguments.run
        limit_bytes = int(arguments.limit_gib * 2**30)
        print(json.dumps(train(tiers, arguments.budget, limit_bytes, arguments.offload_dir)))
        return
    show([in_a_process(tiers, arguments) for tiers in (None, "disk")], arguments.json, "training under a memory limit")


if __name__ == "__main__":
    main()
