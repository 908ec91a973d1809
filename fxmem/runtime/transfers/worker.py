"""An in-order queue of copies on a thread of its own: what a stream is on a GPU."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable


class Job:
    """One queued call. `cancel` before it starts makes it do nothing."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._error: BaseException | None = None
        self._done = threading.Event()
        self._is_cancelled = False

    def run(self) -> None:
        call, self._call = self._call, None  # what the call refers to dies with it
        try:
            if call is not None and not self._is_cancelled:
                call()
        except BaseException as error:
            self._error = error.with_traceback(None)
        finally:
            del call
            self._done.set()

    def cancel(self) -> None:
        self._is_cancelled = True

    def finish(self) -> None:
        """Block until it has run. Raises what it raised."""
        self._done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Block until it has run; what it raised is left for `finish`."""
        self._done.wait()

    def settle(self) -> None:
        """Block until it will not run any more; errors are dropped."""
        self.cancel()
        self._done.wait()


class Worker:
    """A daemon thread that starts with the first job and runs jobs in order. A forked child gets a thread of its own;
    jobs of before the fork are the parent's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> Job:
        if self._pid != os.getpid():
            self._forget()
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        job = Job(call)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """Let the queued jobs run, then end the thread. A later `submit` starts another."""
        if self._thread is not None and self._pid == os.getpid():
            self._jobs.put(None)
            self._thread.join()
        self._thread = None


_COPYING = threading.local()


def is_copying_thread() -> bool:
    """Is this the thread of a worker? It must not wait for one."""
    return getattr(_COPYING, "is_worker", False)


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    _COPYING.is_worker = True
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or this frame would keep the last copy's bytes alive until the next one
