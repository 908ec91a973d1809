"""Run a check over what a strategy draws, so many times, the same every time."""

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

NUM_EXAMPLES = int(os.environ.get("FXMEM_FUZZ_EXAMPLES", "200"))
"""Examples of each strategy; `make fuzz` asks for 10,000."""


def run(strategy: SearchStrategy[Any], check: Callable[[Any], Any], num_examples: int) -> None:
    """Raises what `check` raises of the first example that it refuses; nothing is shrunk or stored."""

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
        check(drawn)

    all_examples()
