"""A module written statement by statement, each run on meta tensors as it is drawn."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

DTYPES = ("float32", "float32", "float32", "float64", "bfloat16")
PREAMBLE = "\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


@dataclass(frozen=True)
class Rule:
    """`write(builder, name)` says something about the value `name`, for which `where` holds.

    `feature`: the name by which it is left out. Without `needs_value` it takes no value.
    """

    feature: str
    where: Callable[[Tensor], bool]
    write: Callable[[Builder, str], object]
    needs_value: bool = True


class Builder:
    """A module under construction. Rules call `let`, `do`, `layer`, `pick` and `choose`."""

    def __init__(self, draw: st.DrawFn, without: frozenset[str]) -> None:
        self.draw, self.without = draw, without
        dtype = "float32" if "low precision" in without else draw(st.sampled_from(DTYPES))
        self.dtype = "" if dtype == "float32" else f", dtype=torch.{dtype}"
        self.float_dtype = getattr(torch, dtype)
        self.module = nn.Module()
        self.values: dict[str, Tensor] = {}
        self.classes: dict[str, str] = {}
        self.linears: list[str] = []
        self._names: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "self": self.module}
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

    def define(self, name: str, text: str) -> None:
        """A class beside the module's, once."""
        if name not in self.classes:
            self.classes[name] = textwrap.dedent(text).strip()
            self._run(self.classes[name])

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

    def add_inputs(self, rules: Sequence[Rule]) -> None:
        fitting = [rule for rule in rules if rule.feature not in self.without]
        self.apply(self.draw(st.sampled_from(fitting)))
        if self.draw(st.booleans()):
            self.apply(self.draw(st.sampled_from(fitting)))

    def applicable(self, rules: Sequence[Rule]) -> list[Rule]:
        return [rule for rule in rules if rule.feature not in self.without and self._fitting(rule.where)]

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
        end = f"{seed}\nmodule = Drawn()\nargs = ({arguments})\n"
        return "\n\n".join([PREAMBLE, *self.classes.values(), "\n".join(lines), end])

    # internals

    def _results(self) -> list[str]:
        """The outputs: differentiable values that nothing reads, and with some luck others."""
        learning = [name for name, value in self.values.items() if value.requires_grad and not name.startswith("x")]
        if not learning:
            weight = self.layer("weight", f"nn.Parameter(torch.ones((){self.dtype}))")
            learning = [self.let(f"{self.pick(lambda value: True)} * {weight}")]
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
