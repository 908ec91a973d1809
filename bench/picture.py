"""The picture of a report in the README: GPT-2 planned for a CPU that need not be here, and the page's first screen.

    python -m bench.picture [--to docs/report.png]

Needs Chromium or Chrome. The same plan at each run: its costs are those of a device preset.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

import fxmem
from bench.browser import browse
from fxmem.testing import zoo

MODEL, BUDGET = "gpt2", 0.5
WIDTH, HEIGHT = 1000, 1070
MAX_BYTES = 200_000
_LIGHT = "--blink-settings=preferredColorScheme=1"


@click.command()
@click.option("--to", type=click.Path(path_type=Path), default=Path("docs/report.png"), show_default=True)
def main(to: Path) -> None:
    """Write the picture."""
    module, args = zoo.build(MODEL, "small")
    plan = fxmem.plan(module, args, BUDGET, device_spec="cpu")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        plan.report(page)
        browse(page, f"--screenshot={to.absolute()}", _LIGHT, width=WIDTH, height=HEIGHT)
    nbytes = to.stat().st_size
    if nbytes > MAX_BYTES:
        raise click.ClickException(f"{to} has {nbytes} bytes, more than {MAX_BYTES}")
    click.echo(f"{to}: {nbytes} bytes, {plan!r}")


if __name__ == "__main__":
    main()
