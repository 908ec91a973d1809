"""Train under a real memory limit: a step whose saved tensors exceed 1 GiB, with the disk tier and without.

    python -m bench.edge_disk [--limit-gib 1.0] [--budget 300MiB] [--offload-dir DIR] [--modes free,disk] [--json]

Each run is a process of its own. `free` has no plan and no limit. The others may take `limit-gib` of private memory
(RLIMIT_DATA, beyond what the process has when the model is there): `none` has no plan, `recompute` the budget and no
tier, `disk` the budget and the disk tier. The default budget is below what recomputation alone can keep.
`resident_bytes`: peak of the process beyond its start; `planned_bytes`, `moved_bytes`: of the plan; `gradients`: a
digest of all bits. Exit status 1 unless `none` and `recompute` fail, `disk` trains with the gradients of `free` and
moves bytes, and its process is smaller by four fifths of what the plans say.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxmem
from bench.common import Row, show

WIDTH, ROWS, LAYERS = 256, 65536, 12
"""One saved tensor of a layer has 64 MiB; two a layer make 1.5 GiB. Parameters have 3 MiB."""
MODES = ("free", "none", "recompute", "disk")


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


def train(mode: str, budget: str, limit_bytes: int, offload_dir: str | None) -> Row:
    """Two steps under the limit; what happened."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Deep(), torch.randn(ROWS, WIDTH)
    model(x[:2]).backward()  # the libraries' own memory comes first
    model.zero_grad()
    start_bytes = resident_bytes("VmRSS")
    if mode != "free":
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()  # data and stacks
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit_bytes, used + limit_bytes))
    row = _row(mode)
    tiers = ("disk",) if mode == "disk" else ()
    try:
        step: Any = model if mode == "none" else fxmem.compile(model, tiers=tiers, offload_dir=offload_dir)
        if mode in ("recompute", "disk"):
            step.set_budget(budget)
        for _ in range(2):
            model.zero_grad()
            begin = time.perf_counter()
            step(x).backward()
            row["step_s"] = time.perf_counter() - begin
        if mode != "none":
            row["planned_bytes"], row["moved_bytes"] = step.plan.peak_bytes, step.plan.simulation.bytes_moved
        found = [p.grad for p in model.parameters() if p.grad is not None]
        row["trained"] = all(bool(grad.isfinite().all()) for grad in found)
        row["gradients"] = hashlib.sha256(b"".join(grad.numpy().tobytes() for grad in found)).hexdigest()[:12]
    except (RuntimeError, MemoryError, fxmem.FxmemError) as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    row["resident_bytes"] = resident_bytes("VmHWM") - start_bytes
    return row


def _row(mode: str, error: str = "") -> Row:
    figures = dict.fromkeys(("resident_bytes", "planned_bytes", "moved_bytes"), 0)
    return {"mode": mode, "trained": False, **figures, "step_s": 0.0, "gradients": "", "error": error}


def in_a_process(mode: str, arguments: argparse.Namespace) -> Row:
    """The row that a process of its own prints."""
    command = [sys.executable, "-m", "bench.edge_disk", "--run", mode, "--budget", arguments.budget]
    command += ["--limit-gib", str(arguments.limit_gib)]
    command += ["--offload-dir", arguments.offload_dir] if arguments.offload_dir else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return _row(mode, (done.stderr.strip().splitlines() or ["no output"])[-1][:120])
    row: Row = json.loads(lines[-1])
    return row


def complaints(rows: Sequence[Row]) -> list[str]:
    """What is not as it should be in `rows`, as far as their modes are there."""
    by = {row["mode"]: row for row in rows}
    found = [f"{mode} trained" for mode in ("none", "recompute") if mode in by and by[mode]["trained"]]
    found += [
        f"{mode} did not train: {by[mode]['error']}"
        for mode in ("free", "disk")
        if mode in by and not by[mode]["trained"]
    ]
    if found or "disk" not in by:
        return found
    disk = by["disk"]
    if not disk["moved_bytes"]:
        found.append("disk moved no bytes")
    if "free" in by:
        free = by["free"]
        if disk["gradients"] != free["gradients"]:
            found.append("gradients differ")
        if free["resident_bytes"] - disk["resident_bytes"] < 0.8 * (free["planned_bytes"] - disk["planned_bytes"]):
            found.append("the process is larger than its plan")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-gib", type=float, default=1.0)
    parser.add_argument("--budget", default="300MiB")
    parser.add_argument("--offload-dir")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", choices=MODES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.run:
        print(json.dumps(train(given.run, given.budget, int(given.limit_gib * 2**30), given.offload_dir)))
        return 0
    rows = [in_a_process(mode, given) for mode in given.modes.split(",")]
    show(rows, given.json, "training under a memory limit")
    found = complaints(rows)
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
