"""Training loops as people write them, eager against fxmem: budgets held, gradients, plans, seconds.

    python -m bench.loops [NAMES] [--budget 0.75] [--json]

Each loop runs twice, in fresh processes, the second with an empty cost cache and a budget that is a share of the
largest peak of eager's steps. Every step is measured as a whole, forward and backward, less what models compiled beside
the largest hold. `over`: steps above the budget in which nothing was planned; `over_new`: those in which something was
(the measurement that leads to another plan is one of them); `worst_bytes`: the largest excess of `over`, or of
`over_new` where that is 0. `graphs`, `plans`: those seen after any step. `replans`: plans beyond one a graph.
`grad_error`: norm of the difference to eager's gradients over their norm, the worst step; None if no step leaves any.
`loss_error`: largest difference of losses. `later_s`: median of the steps after the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import click

from bench.common import show
from bench.loops.compare import LOOPS, SHARE, row


@click.command()
@click.argument("names", nargs=-1)
@click.option("--budget", "share", type=float, help=f"share of eager's largest peak, if not the loop's or {SHARE}")
@click.option("--timeout", "timeout_s", default=300.0, show_default=True, help="seconds for one run of a loop")
@click.option("--json", "as_json", is_flag=True)
def main(names: Sequence[str], share: float | None, timeout_s: float, as_json: bool) -> None:
    """Training loops under a budget."""
    started = time.perf_counter()
    rows = []
    for name in names or LOOPS:
        rows.append(row(LOOPS[name], share, timeout_s))
        click.echo(f"{time.perf_counter() - started:6.0f} s  {name}: {rows[-1]['error'] or 'ran'}", err=True)
    if as_json:
        show(rows, as_json, "")
        return
    show([{k: v for k, v in row.items() if k != "error"} for row in rows], as_json, "training loops under a budget")
    for row_ in rows:
        if row_["error"]:
            click.echo(f"{row_['loop']}: {row_['error']}")


if __name__ == "__main__":
    main()
