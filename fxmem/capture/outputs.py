"""What of a model's result the caller uses: the rest need not be made, nor live to the end of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Outputs = str | Sequence[str] | Callable[[Any], Any]
"""Names of the fields or keys that are used, or a function from the whole result to what is."""


def with_outputs(step: Callable[..., Any], outputs: Outputs | None) -> Callable[..., Any]:
    """`step`, returning only what is used: of a mapping, dataclass or object with such attributes everything else
    becomes None; a function's result is returned as it is. `step` itself where all is used."""
    if outputs is None:
        return step
    select = outputs if callable(outputs) else _by_name((outputs,) if isinstance(outputs, str) else tuple(outputs))

    def selected(*args: Any, **kwargs: Any) -> Any:
        return select(step(*args, **kwargs))

    return selected


def _by_name(names: tuple[str, ...]) -> Callable[[Any], Any]:
    def select(result: Any) -> Any:
        if dataclasses.is_dataclass(result) and not isinstance(result, type):
            fields = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
            return type(result)(**_kept(fields, names))
        if isinstance(result, Mapping):
            return _kept(result, names)
        if hasattr(result, "_fields"):
            return type(result)(**_kept(result._asdict(), names))
        raise TypeError(f"outputs={list(names)}: {type(result).__name__} has no names; give a function of the result")

    return select


def _kept(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    missing = [name for name in names if name not in values]
    if missing:
        raise KeyError(f"outputs={list(names)}: the model returns {', '.join(values)}, and no {', '.join(missing)}")
    return {name: value if name in names else None for name, value in values.items()}
