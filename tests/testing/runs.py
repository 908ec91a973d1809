"""Run a check over what a strategy draws, so many times, the same every time."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisWarning
from hypothesis.strategies import SearchStrategy

NUM_EXAMPLES = int(os.environ.get("FXMEM_FUZZ_EXAMPLES", "0"))
"""Examples of each strategy that `make fuzz` asks for; 0: each test's own number."""
LIMIT_S = float(os.environ.get("FXMEM_FUZZ_SECONDS", "inf"))


class TimeIsUp(BaseException):
    """Ends a run; not an Exception, so that hypothesis does not take it for a failure."""


def run(strategy: SearchStrategy[Any], check: Callable[[Any], Any], num_examples: int, limit_s: float = LIMIT_S) -> int:
    """How many examples were checked. Raises what `check` raises of the first one that it refuses; nothing is shrunk or
    stored, so the example in the message is the one that was drawn."""
    num_checked, started = 0, time.monotonic()

    @settings(
        max_examples=num_examples,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def all_examples(drawn: Any) -> None:
        nonlocal num_checked
        if time.monotonic() - started > limit_s:
            raise TimeIsUp
        check(drawn)
        num_checked += 1

    with contextlib.suppress(TimeIsUp), warnings.catch_warnings():
        warnings.simplefilter("ignore", HypothesisWarning)  # of examples whose text is long
        all_examples()
    return num_checked


def fuzz(name: str, strategy: SearchStrategy[Any], check: Callable[[Any], Any], num_examples: int = 200) -> None:
    """`run` with as many examples and as much time as `make fuzz` asks for; prints how many there were."""
    wanted = NUM_EXAMPLES or num_examples
    started = time.monotonic()
    num_checked = run(strategy, check, wanted)
    print(f"fuzz {name}: {num_checked} of {wanted} examples in {time.monotonic() - started:.0f} s, no violation")
    assert num_checked
