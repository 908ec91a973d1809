"""Functions in processes of their own: a crash, a hang or a broken torch there is an outcome here, not an end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "fxmem.api", "fxmem.step.compiled", "fxmem.planners.plan"])
_END_S = 10  # an idle process is given so long to end by itself


@dataclass(frozen=True)
class Outcome:
    """`value` of the function, or `error`: type and message of what it raised, how its process died, a timeout."""

    value: Any = None
    error: str | None = None


class Worker:
    """A process whose torch has not run yet, calling `function` with what it is sent; everything must pickle.

    `environ`: what its environment has besides. `is_forked`: from a process that has imported everything; where time
    is measured it should not be, as the pages of the heap are copied when they are first touched.
    """

    def __init__(
        self, function: Callable[..., Any], environ: Mapping[str, str] | None = None, is_forked: bool = True
    ) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process if is_forked else multiprocessing.get_context("spawn").Process
        self.process = process(target=_serve, args=(theirs, function, dict(environ or {})))
        self.process.start()
        theirs.close()
        self.num_calls = 0

    @property
    def is_alive(self) -> bool:
        return not self.pipe.closed

    def call(self, *args: Any, timeout_s: float) -> Outcome:
        """`function(*args)`; after a crash or a timeout the process is gone."""
        self.num_calls += 1
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(args)
        try:
            if self.pipe.poll(timeout_s):
                return Outcome(*self.pipe.recv())
            error = f"no end within {timeout_s:.0f} s"
            self.process.kill()
        except (EOFError, ConnectionResetError):
            self.process.join()
            error = f"the process died, exit code {self.process.exitcode}"
        self.close()
        return Outcome(error=error)

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(_END_S)
        self.process.kill()


def call(
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    is_forked: bool = True,
) -> Outcome:
    """`function(*args)` in a process of its own: see `Worker`."""
    worker = Worker(function, environ, is_forked)
    try:
        return worker.call(*args, timeout_s=timeout_s)
    finally:
        worker.close()


def each(
    function: Callable[[Any], Any],
    items: Iterable[Any],
    timeout_s: float,
    num_workers: int = 1,
    num_calls: int = 50,
    environ: Mapping[str, str] | None = None,
) -> Iterator[tuple[Any, Outcome]]:
    """(item, outcome of `function(item)`) in order; a process is used for `num_calls` items, or until it dies."""
    own = threading.local()
    workers: list[Worker] = []

    def one(item: Any) -> tuple[Any, Outcome]:
        worker: Worker | None = getattr(own, "worker", None)
        if worker is not None and worker.is_alive and worker.num_calls >= num_calls:
            worker.close()
        if worker is None or not worker.is_alive:
            worker = own.worker = Worker(function, environ)
            workers.append(worker)
        return item, worker.call(item, timeout_s=timeout_s)

    with ThreadPoolExecutor(num_workers) as pool:
        try:
            yield from pool.map(one, items)
        finally:
            pool.shutdown(cancel_futures=True)
            for worker in workers:
                worker.close()


def shortened(error: BaseException, limit: int = 160) -> str:
    """Type and message in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _serve(pipe: Connection, function: Callable[..., Any], environ: Mapping[str, str]) -> None:
    os.environ.update(environ)
    with contextlib.suppress(EOFError):  # nobody has anything more to ask
        while True:
            pipe.send(_result(function, pipe.recv()))


def _result(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return function(*args), None
    except Exception as error:
        traceback.print_exc()
        return None, shortened(error)
