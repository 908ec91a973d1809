"""Random modules that print as the Python that makes them.

A module is drawn statement by statement: each statement runs on meta tensors as it is drawn, so the next one knows real
shapes, strides and dtypes, and what is drawn is a program that runs. What a rule may write is in `module_rules`.
"""

from __future__ import annotations

import linecache
from collections.abc import Collection
from hashlib import sha256
from types import CodeType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from fxmem.errors import OptionError
from fxmem.testing.module_builder import Builder
from fxmem.testing.module_rules import INPUTS, RULES

FEATURES = frozenset(rule.feature for rule in (*RULES, *INPUTS)) | {"low precision", "outputs"}
"""What a drawn module may have; `without=` names what it must not."""


class DrawnModule:
    """A module with arguments, as Python: `source` defines `module` and `args`. The same source makes the same values.

    Its `repr` holds the source, so what hypothesis prints can be pasted and run.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._code = compile_source(source)

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """A new (module, args) every time, equal to one another; torch's random state stays as it is."""
        names = run_source(self._code)
        return names["module"], names["args"]

    def __repr__(self) -> str:
        return f"DrawnModule(r'''{self.source}''')"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


@st.composite
def modules(draw: st.DrawFn, num_ops: tuple[int, int] = (1, 8), without: Collection[str] = ()) -> DrawnModule:
    """A random module in training mode with arguments, at least one differentiable output, and a few hundred elements.

    It may have linear and convolution layers, batch, layer and group norms, attention, dropout and other draws, views
    and slices, in-place ops, buffers that forward updates, arguments that it overwrites, tied weights, custom autograd
    functions, integer and odd (strided, expanded, 0-d, empty) arguments, several outputs, and float64 or bfloat16.

    `num_ops`: least and most rules applied, each of one to five statements. `without`: names in `FEATURES` to leave
    out. Raises OptionError for an unknown name.
    """
    unknown = sorted(set(without) - FEATURES)
    if unknown:
        raise OptionError(f"unknown features {unknown}: choose from {sorted(FEATURES)}")
    builder = Builder(draw, frozenset(without))
    builder.add_inputs(INPUTS)
    for _ in range(draw(st.integers(*num_ops))):
        builder.apply(draw(st.sampled_from(builder.applicable(RULES))))
    return DrawnModule(builder.finish())


def run_source(code: CodeType) -> dict[str, Any]:
    """The names that `code` defines; torch's random state stays as it is."""
    names: dict[str, Any] = {"__name__": "drawn"}
    with torch.random.fork_rng(devices=[]):
        exec(code, names)
    return names


def compile_source(source: str) -> CodeType:
    """Code whose tracebacks and stack traces show its lines."""
    file = f"<drawn {sha256(source.encode()).hexdigest()[:12]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")
