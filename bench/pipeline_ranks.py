"""One process a rank over gloo on this machine."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as mp

from bench.common import Row


def run_ranks(num_ranks: int, function: Callable[[int], Row], timeout_s: float) -> list[Row]:
    """`function(rank)` in a process for each rank, forked from this one; what it returned, or {"error": text}.

    `timeout_s`: after which what still runs is killed. Messages are waited for half as long.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, num_ranks, folder, function, timeout_s / 2) for rank in range(num_ranks)]
        processes = [context.Process(target=_rank, args=a) for a in arguments]
        for process in processes:
            process.start()
        end = time.monotonic() + timeout_s
        for process in processes:
            process.join(max(end - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
        paths = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        return [json.loads(path.read_text()) if path.exists() else {"error": "died"} for path in paths]


def _rank(rank: int, num_ranks: int, folder: str, function: Callable[[int], Row], message_s: float) -> None:
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)  # type: ignore[attr-defined]
    limit = timedelta(seconds=message_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    try:
        result = function(rank)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    os._exit(0)
