"""The lines that put a script's model under a budget: at most two, and where they go."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from fxmem.cli.first_backward import Place


@dataclass(frozen=True)
class Edit:
    """`text` becomes a line of its own after line `after` of the script as it is (0: before the first)."""

    after: int
    text: str


def edits(source: str, place: Place, budget: str) -> list[Edit]:
    """The lines to add to `source` so that the module called at `place` trains under `budget`."""
    tree = ast.parse(source)
    name = place.name or "model"
    last, indent = _after_assignment(tree, place, name)
    return [
        Edit(_after_header(tree), "import fxmem"),
        Edit(last, f'{" " * indent}{name} = fxmem.compile({name}, budget="{budget}")'),
    ]


def apply_edits(source: str, made: Sequence[Edit]) -> str:
    """`source` with the lines added."""
    lines = source.splitlines()
    for edit in sorted(made, key=lambda edit: -edit.after):
        lines.insert(edit.after, edit.text)
    return "\n".join(lines) + "\n"


def _after_header(tree: ast.Module) -> int:
    """After the docstring and imports from the future, where imports may begin."""
    last = 0
    for statement in tree.body:
        is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_docstring or is_future):
            break
        last = statement.end_lineno or 0
    return last


def _after_assignment(tree: ast.Module, place: Place, name: str) -> tuple[int, int]:
    """(line after which, indentation) of the last assignment of `name` before it is called; else where the function
    that calls it begins."""
    scope = _scope(tree, place.function)
    assigned = [
        statement
        for statement in ast.walk(scope)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and name in _targets(statement)
    ]
    earlier = [s for s in assigned if s.lineno < place.line] if place.function else assigned
    if earlier:
        last = max(earlier, key=lambda statement: statement.lineno)
        return last.end_lineno or last.lineno, last.col_offset
    first = scope.body[0]
    return first.lineno - 1, first.col_offset


def _scope(tree: ast.Module, function: str) -> ast.Module | ast.FunctionDef | ast.AsyncFunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
            return node
    return tree


def _targets(statement: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
