"""`python -m bench`: the benches, a line each; each runs as `python -m bench.NAME`."""

from __future__ import annotations

import ast
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent


def benches() -> dict[str, str]:
    """Name -> first line of the docstring of every module that is a program of its own."""
    found = {}
    for path in sorted([*FOLDER.glob("[!_]*.py"), *FOLDER.glob("*/__main__.py")]):
        text = path.read_text(encoding="utf-8")
        if '__name__ == "__main__"' in text:
            name = path.parent.name if path.stem == "__main__" else path.stem
            found[name] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> None:
    table = Table(show_header=False, box=None)
    for name, line in benches().items():
        table.add_row(f"python -m bench.{name}", line)
    Console().print(table)


if __name__ == "__main__":
    main()
