"""A standard output that holds only what fxmem prints: the MILP solver writes a line of its own now and then."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def clean_stdout() -> Iterator[None]:
    """While open, what C libraries print goes to the process's standard error; `sys.stdout` reaches the real output.

    For programs that print JSON. Changes nothing where `sys.stdout` is not the process's own (under a test runner).
    HiGHS prints with `printf`, whatever its options say (jump-dev/HiGHS.jl issue 312).
    """
    ours = sys.stdout
    try:
        is_real = os.name == "posix" and ours.fileno() == 1
    except (AttributeError, OSError, ValueError, io.UnsupportedOperation):
        is_real = False
    if not is_real:
        yield
        return
    _flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(real), "w", encoding=ours.encoding, errors=ours.errors) as sys.stdout:
            yield
    finally:
        sys.stdout = ours
        _flush()
        os.dup2(real, 1)
        os.close(real)


def _flush() -> None:
    """Python's and C's buffers."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
