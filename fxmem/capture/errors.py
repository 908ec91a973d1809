"""Failures of capture in the user's terms: what is wrong, and at which line of the model."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

from fxmem import compat
from fxmem.errors import CaptureError, FxmemError

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
_TORCH = re.compile(r"[/\\]torch[/\\]")
_AROUND = re.compile(r"[/\\](?:torch[/\\]_dynamo|fxmem[/\\]compat)[/\\]")
_PACKAGE = str(Path(__file__).parents[1])
_FORWARD_TRACE = "Traceback of forward call that caused the error"
_NOISE = re.compile(
    r"\n\s*(?:from user code:|Set TORCHDYNAMO_VERBOSE|For even more developer context|Developer debug context:"
    r"|Hint:).*",
    re.DOTALL,
)
_REMEDY = (
    "Write that line without it (no sizes and no branches that depend on the values of tensors), "
    "or leave it out of what is compiled: the parts before and after it can be compiled each by itself."
)


def user_frame(stack_trace: str | None) -> str | None:
    """'file:line: code' of the innermost frame of a printed stack that is not torch's (or fxmem's) own, or of all;
    the frames that Dynamo and fxmem put around a module tell nothing."""
    found = _FRAME.finditer(stack_trace or "")
    frames = [m for m in found if not _AROUND.search(m["file"])]
    user = [m for m in frames if not (_TORCH.search(m["file"]) or m["file"].startswith(_PACKAGE))] or frames
    return f"{user[-1]['file']}:{user[-1]['line']}: {user[-1]['code'].strip()}" if user else None


def as_capture_error(error: Exception, forward_trace: str | None = None) -> FxmemError:
    """The error as a CaptureError with the model's line; fxmem's own errors are returned as they are."""
    inner = error.inner_exception if isinstance(error, compat.BackendCompilerFailed) else error
    if isinstance(inner, FxmemError):
        return inner
    source = user_frame(forward_trace) or compat.innermost_user_frame(error) or user_frame(str(error))
    source = source or user_frame("".join(traceback.format_tb(inner.__traceback__)))
    message = _NOISE.sub("", str(inner)).strip() or "no message"
    return CaptureError(f"can't capture the model: {type(inner).__name__}: {message}", source)


def graph_break(error: Exception) -> CaptureError:
    """Why torch can't make one graph of a callable, with the line and a remedy."""
    found = as_capture_error(error)
    source = found.source if isinstance(found, CaptureError) else None
    reason = _NOISE.sub("", f"{type(error).__name__}: {error}").strip()
    return CaptureError(f"torch breaks the graph here: {reason}\n  {_REMEDY}", source)


@contextlib.contextmanager
def capture_errors(falls_back: bool = False) -> Iterator[None]:
    """Turn what fails inside into CaptureError; when a backward fails, autograd only warns of the forward line.

    `falls_back`: what makes Dynamo run the model as it is, instead of failing (sizes that depend on values), passes.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            yield
        except compat.RestartAnalysis:  # Dynamo starts over: not a failure
            raise
        except Exception as error:
            if falls_back and isinstance(error, compat.exceptions_allowed_to_be_fallback):
                raise
            trace = next((str(w.message) for w in reversed(seen) if _FORWARD_TRACE in str(w.message)), None)
            raise as_capture_error(error, trace) from error
    for warning in seen:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


@contextlib.contextmanager
def unwrapped_errors() -> Iterator[None]:
    """Let fxmem's own errors, raised inside a Dynamo backend, reach the user without Dynamo's wrapping."""
    try:
        yield
    except compat.FailOnRecompileLimitHit as error:
        raise CaptureError(
            f"the model was compiled {compat.RECOMPILE_LIMIT} times for other inputs or attributes, and would run "
            f"without a plan from now on; keep what changes in tensors, or set dynamic=True. {_summary(error)}",
            compat.innermost_user_frame(error),
        ) from error
    except compat.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, FxmemError):
            raise error.inner_exception from None
        raise


def _summary(error: Exception) -> str:
    """What Dynamo says of the last recompilation, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:3])
