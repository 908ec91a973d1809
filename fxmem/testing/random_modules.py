"""Random modules that print as the Python that makes them.

A module is drawn statement by statement: each statement runs on meta tensors as it is drawn, so the next one knows real
shapes, strides and dtypes, and what is drawn is a program that runs. What a rule may write is in `module_rules`.
"""

from __future__ import annotations

import itertools
import linecache
import re
import textwrap
from collections.abc import Callable, Collection
from hashlib import sha256
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from fxmem.errors import OptionError
from fxmem.testing.module_rules import CLASSES, INPUTS, RULES, Rule

FEATURES = frozenset(rule.feature for rule in (*RULES, *INPUTS)) | {"low precision", "outputs"}
"""What a drawn module may have; `without=` names what it must not."""
_DTYPES = ("float32", "float32", "float32", "float64", "bfloat16")
_PREAMBLE = "\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


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
    builder.add_inputs()
    for _ in range(draw(st.integers(*num_ops))):
        builder.apply(draw(st.sampled_from(builder.applicable())))
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


class Builder:
    """A module under construction. Rules call `let`, `do`, `layer`, `pick` and `choose`."""

    def __init__(self, draw: st.DrawFn, without: frozenset[str]) -> None:
        self.draw, self.without = draw, without
        dtype = "float32" if "low precision" in without else draw(st.sampled_from(_DTYPES))
        self.dtype = "" if dtype == "float32" else f", dtype=torch.{dtype}"
        self.float_dtype = getattr(torch, dtype)
        self.module = nn.Module()
        self.values: dict[str, Tensor] = {}
        self.classes: dict[str, str] = {}
        self.linears: list[str] = []
        self._names = {"torch": torch, "F": F, "nn": nn, "self": self.module}
        self._numbers = itertools.count()
        self._init: list[str] = []
        self._forward: list[str] = []
        self._inputs: dict[str, str] = {}

    # what rules use

    def choose(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def let(self, expression: str) -> str:
        """`v<n> = expression` in forward; returns the name."""
        name = f"v{next(self._numbers)}"
        self.do(f"{name} = {expression}")
        self.values[name] = self._names[name]
        return name

    def do(self, statement: str) -> None:
        """A statement of forward."""
        self._forward.append(statement)
        self._run(statement)

    def layer(self, kind: str, expression: str) -> str:
        """`self.<kind><n> = expression` in `__init__`; returns `self.<kind><n>`."""
        name = f"self.{kind}{len(self._init)}"
        self._initialise(f"{name} = {expression}")
        return name

    def buffer(self, expression: str) -> str:
        name = f"buffer{len(self._init)}"
        self._initialise(f'self.register_buffer("{name}", {expression})')
        return f"self.{name}"

    def function(self, name: str) -> str:
        """The name of a class of `CLASSES`, which is then defined."""
        if name not in self.classes:
            self.classes[name] = CLASSES[name]
            self._run(CLASSES[name])
        return name

    def argument(self, expression: str) -> str:
        """One more argument of forward, made by `expression`."""
        name = f"x{len(self._inputs)}"
        self._inputs[name] = expression
        self._run(f"{name} = {expression}")
        self.values[name] = self._names[name]
        return name

    def pick(self, where: Callable[[Tensor], bool]) -> str:
        """A value of the module's own float type for which `where` holds; half of the time the newest."""
        newest, *older = reversed(self._fitting(where))
        return self.choose(newest, *older) if not older or self.draw(st.booleans()) else newest

    # drawing

    def add_inputs(self) -> None:
        fitting = [rule for rule in INPUTS if rule.feature not in self.without]
        self.apply(self.draw(st.sampled_from(fitting)))
        if self.draw(st.booleans()):
            self.apply(self.draw(st.sampled_from(fitting)))

    def applicable(self) -> list[Rule]:
        return [rule for rule in RULES if rule.feature not in self.without and self._fitting(rule.where)]

    def apply(self, rule: Rule) -> None:
        rule.write(self, self.pick(rule.where) if rule.needs_value else "")

    def finish(self) -> str:
        results = self._results()
        body = [*self._forward, f"return {results[0] if len(results) == 1 else ', '.join(results)}"]
        init = ["super().__init__()", *self._init]
        lines = [
            "class Drawn(nn.Module):",
            "    def __init__(self):",
            *(f"        {line}" for line in init),
            "",
            f"    def forward({', '.join(('self', *self._inputs))}):",
            *(f"        {line}" for line in body),
        ]
        arguments = "".join(f"{expression}, " for expression in self._inputs.values()).rstrip()
        seed = f"torch.manual_seed({self.draw(st.integers(0, 99))})"
        classes = [textwrap.dedent(text).strip() for text in self.classes.values()]
        return "\n\n".join([_PREAMBLE, *classes, "\n".join(lines), f"{seed}\nmodule = Drawn()\nargs = ({arguments})\n"])

    # internals

    def _results(self) -> list[str]:
        """The outputs: differentiable values that nothing reads, and with some luck others."""
        learning = [name for name, value in self.values.items() if value.requires_grad and not name.startswith("x")]
        if not learning:
            learning = [self.let(f"{self.pick(_any)} * {self.layer('weight', f'nn.Parameter(torch.ones((){self.dtype}))')}")]
        if "outputs" in self.without:
            return learning[-1:]
        read = set(re.findall(r"\w+", " ".join(line.split(" = ", 1)[-1] for line in self._forward)))
        results = [name for name in learning if name not in read] or learning[-1:]
        return [*results, *self.draw(st.lists(st.sampled_from(sorted(self.values)), max_size=2))]

    def _fitting(self, where: Callable[[Tensor], bool]) -> list[str]:
        return [name for name, value in self.values.items() if value.dtype == self.float_dtype and where(value)]

    def _initialise(self, statement: str) -> None:
        self._init.append(statement)
        self._run(statement)

    def _run(self, statement: str) -> None:
        with torch.device("meta"):
            exec(textwrap.dedent(statement), self._names)


def _any(value: Tensor) -> bool:
    return True
