"""A function in a process of its own: a crash, a hang or a broken torch there is an outcome here, not an end."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "fxmem.api", "fxmem.step.compiled", "fxmem.planners.plan"])


@dataclass(frozen=True)
class Outcome:
    """`value` of the function, or `error`: the last line of its traceback, a signal, a timeout."""

    value: Any = None
    error: str | None = None


class Call:
    """`function(*args)`, started at once in a fresh process whose torch has not run yet; all of it must pickle."""

    def __init__(self, function: Callable[..., Any], args: Sequence[Any] = ()) -> None:
        self.receiver, sender = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_send_result, args=(sender, function, tuple(args)))
        self.process.start()
        sender.close()

    def outcome(self, timeout_s: float) -> Outcome:
        """Wait for the end, at most so long; the process is gone afterwards."""
        try:
            if not self.receiver.poll(timeout_s):
                return Outcome(error=f"no end within {timeout_s:.0f} s")
            value, error = self.receiver.recv()
            return Outcome(value, error)
        except EOFError:
            self.process.join()
            return Outcome(error=f"the process died, exit code {self.process.exitcode}")
        finally:
            self.process.kill()
            self.process.join()
            self.receiver.close()


def call(function: Callable[..., Any], *args: Any, timeout_s: float) -> Outcome:
    """`function(*args)` in a fresh process."""
    return Call(function, args).outcome(timeout_s)


def shortened(error: BaseException, limit: int = 160) -> str:
    """Type and message in one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _send_result(sender: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        result = function(*args), None
    except Exception as error:
        traceback.print_exc()
        result = None, shortened(error)
    sender.send(result)
