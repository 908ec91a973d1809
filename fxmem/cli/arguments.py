"""What is typed on the command line: models and budgets."""

from __future__ import annotations

import importlib
from typing import Any

from fxmem.budget import Budget
from fxmem.errors import OptionError


def load_model(name: str, size: str = "small") -> tuple[Any, tuple[Any, ...]]:
    """(model, args) from the zoo or from 'package.module:function'. Raises OptionError."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            built = getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError) as error:
            raise OptionError(f"can't load {name!r}: {error}") from error
        return built[0], tuple(built[1])
    from fxmem.testing import zoo

    if name not in zoo.NAMES:
        raise OptionError(f"unknown model {name!r}: give package.module:function, or one of {', '.join(zoo.NAMES)}")
    return zoo.build(name, size)  # type: ignore[arg-type]


def parse_budget(text: str) -> Budget:
    """A budget as typed: '0.6' is a fraction, '6GiB' and '500000000' bytes, 'min'."""
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number > 1 else number
