"""Partitioners compared in simulation: largest model per device memory, step time under budgets, planning time.

`python -m bench.partition --json` prints one JSON object a line: kind "largest" (parameters of the largest model of
a family that trains at fixed bytes per device, and its ratio to the best of layers/parameters/time), kind "step"
(one planner in one cell of chain, devices, microbatches and budget), kind "memflow" (budgets where every search
without recomputation fails), kind "ilp" (small cases against the integer program's bound), kind "summary". `--quick`
takes a few cells. Nothing runs on a device; seconds are simulated except `solve_s` and `cpu_s`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fxmem.cli.stdout import clean_stdout
from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.pipelining.chain import Chain, Cluster
from fxmem.pipelining.curves import Recompute
from fxmem.pipelining.evaluate import OneFOneBN, least_step_s
from fxmem.pipelining.partition.auto import fits, plan_auto
from fxmem.pipelining.partition.base import Problem
from fxmem.pipelining.partition.periodic_ilp import PeriodicProgram, shortest_period
from fxmem.pipelining.plan import PipelinePlan
from fxmem.pipelining.registry import PLANNERS, plan_pipeline
from fxmem.pipelining.simulate import StageCost
from fxmem.pipelining.synthetic import V100_LINK, amoebanet_like, gpt_like, vgg_like

Row = dict[str, Any]
GIB = 2**30
CLASSIC = ("layers", "parameters", "time")

SIZES: dict[str, Callable[[int], Chain]] = {
    "gpt": lambda size: gpt_like(num_layers=size, width=2048, batch=2),
    "vgg": lambda size: vgg_like(width=4 * size),
    "amoebanet": lambda size: amoebanet_like(num_cells=18, filters=4 * size, batch=16),
    "amoebanet-24": lambda size: amoebanet_like(num_cells=24, filters=4 * size, batch=16),
}
"""Family to a chain of a given size: layers of GPT, width of the CNNs.

18 cells are coarse for 8 devices: near the limit two of the last seven, half a device each, share one. 24 cells, in the
same proportions, come out finer.
"""

CELLS: tuple[tuple[Chain, int, int], ...] = (
    (gpt_like(11), 4, 8),
    (gpt_like(11), 4, 16),
    (gpt_like(24), 4, 16),
    (gpt_like(24), 8, 16),
    (gpt_like(8, width=2048, batch=2), 4, 8),
    (vgg_like(), 4, 8),
    (vgg_like(), 4, 16),
    (amoebanet_like(18), 4, 8),
    (amoebanet_like(18), 4, 16),
    (amoebanet_like(36, batch=16), 8, 32),
)
BUDGETS = (1.25, 1.0, 0.8, 0.6, 0.4)
"""Fractions of the peak of equal-time cuts under 1F1B with nothing recomputed."""


def largest_rows(devices: tuple[int, ...], memory_gib: float = 16.0) -> Iterator[Row]:
    """Largest models per family, number of devices and recomputation."""
    for family in SIZES:
        for num_devices in devices:
            for recompute in ("none", "optimal"):
                yield from _largest(family, num_devices, recompute, memory_gib)


def _largest(family: str, num_devices: int, recompute: Recompute, memory_gib: float) -> Iterator[Row]:
    cluster = Cluster(num_devices, memory_gib * GIB, V100_LINK)

    def problem(size: int) -> Problem:
        return Problem(SIZES[family](size), cluster, 4 * num_devices, recompute)

    feasible: dict[str, Callable[[Problem], bool]] = {
        name: partial(_plans, name) for name in (*CLASSIC, "mcap", "mcap-paper")
    }
    feasible["auto, standard in-flight"] = lambda p: fits(p, standard=True) is not None
    feasible["auto"] = lambda p: fits(p) is not None
    parameters = {}
    for name, check in feasible.items():
        size = largest_size(partial(_fits_at, problem, check))
        parameters[name] = problem(size).chain.num_parameters if size else 0
        best = max(parameters.get(classic, 0) for classic in CLASSIC)
        yield {
            "kind": "largest", "family": family, "devices": num_devices, "recompute": recompute,
            "memory_gib": memory_gib, "planner": name, "size": size, "num_parameters": parameters[name],
            "ratio_to_best_classic": parameters[name] / best if best and name not in CLASSIC else None,
        }  # fmt: skip


def _fits_at(problem: Callable[[int], Problem], check: Callable[[Problem], bool], size: int) -> bool:
    try:
        return check(problem(size))
    except OptionError:  # fewer blocks than devices
        return False


def _plans(planner: str, problem: Problem) -> bool:
    try:
        PLANNERS[planner](problem)
    except (BudgetInfeasible, OptionError):
        return False
    return True


def largest_size(check: Callable[[int], bool], start: int = 4, limit: int = 2000) -> int:
    """The largest size that `check` accepts, taking it as monotone above the first accepted one; 0 if there is none."""
    low = next((size for size in range(start, start + 12, 4) if check(size)), 0)
    if not low:
        return 0
    high = low * 2
    while high < limit and check(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if check(middle) else (low, middle)
    return low


def step_rows(quick: bool) -> Iterator[Row]:
    """Every planner in every cell."""
    cells = CELLS[::4] if quick else CELLS
    for chain, num_devices, num_microbatches in cells:
        roomy = Cluster(num_devices, 1e15, V100_LINK)
        peak = max(plan_pipeline(chain, roomy, num_microbatches, planner="time", recompute="none").peak_bytes)
        for budget in BUDGETS[::2] if quick else BUDGETS:
            cluster = replace(roomy, memory_bytes=peak * budget)
            yield from _cell(chain, cluster, num_microbatches, budget)


def _cell(chain: Chain, cluster: Cluster, num_microbatches: int, budget: float) -> Iterator[Row]:
    base = {
        "kind": "step", "chain": chain.name, "blocks": len(chain), "devices": cluster.num_devices,
        "microbatches": num_microbatches, "budget": budget,
    }  # fmt: skip
    runs: list[tuple[str, str, Recompute, dict[str, Any]]] = [
        ("auto", "auto", "optimal", {}),
        ("auto, 1f1b-n only", "auto", "optimal", {"schedules": ("1f1b-n",)}),
    ]
    runs += [(name, name, "optimal", {}) for name in PLANNERS if name != "auto"]
    runs += [(f"{name}, no recompute", name, "none", {}) for name in ("auto", *CLASSIC)]
    runs += [(f"{name}, full recompute", name, "full", {}) for name in CLASSIC]
    for label, planner, recompute, options in runs:
        yield {**base, "planner": label, **_timed(chain, cluster, num_microbatches, planner, recompute, options)}


def _timed(
    chain: Chain, cluster: Cluster, num: int, planner: str, recompute: Recompute, options: dict[str, Any]
) -> Row:
    cpu = time.process_time()
    plan: PipelinePlan | None = None
    try:
        plan = plan_pipeline(chain, cluster, num, planner=planner, recompute=recompute, **options)
        plan.verify(chain, cluster)
    except (BudgetInfeasible, OptionError):
        pass
    row: Row = {"cpu_s": round(time.process_time() - cpu, 3), "step_s": plan and plan.step_s}
    if plan:
        row |= {"gap": plan.gap, "bubble": plan.bubble, "schedule": plan.schedule.name, "solve_s": plan.solve_s}
    return row


def summary_rows(rows: list[Row]) -> Iterator[Row]:
    """Per planner over the cells: feasible cells, time relative to `auto`, gap to the bound."""
    steps = [row for row in rows if row["kind"] == "step"]
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in steps:
        cells.setdefault(_key(row), {})[row["planner"]] = row
    for reference in ("auto", "auto, 1f1b-n only"):
        for planner in dict.fromkeys(row["planner"] for row in steps):
            pairs = [(cell[planner], cell[reference]) for cell in cells.values() if cell[planner]["step_s"]]
            ratios = [row["step_s"] / best["step_s"] for row, best in pairs if best["step_s"]]
            yield {
                "kind": "summary", "planner": planner, "relative_to": reference, "feasible": len(pairs),
                "cells": len(cells),
                "median_ratio": ratios and statistics.median(ratios), "least_ratio": ratios and min(ratios),
                "largest_ratio": ratios and max(ratios),
                "median_gap": ratios and statistics.median(row["gap"] for row, _ in pairs),
                "largest_cpu_s": max(cell[planner]["cpu_s"] for cell in cells.values()),
            }  # fmt: skip


def memflow_rows() -> Iterator[Row]:
    """Per chain the largest budget of a ladder at which every planner without recomputation fails, and half way from
    there to the least at which memflow finds a plan: what memflow and auto find there.
    """
    for chain, num_devices, num in CELLS[::4]:
        roomy = Cluster(num_devices, 1e15, V100_LINK)
        peak = max(plan_pipeline(chain, roomy, num, planner="time", recompute="none").peak_bytes)
        at = partial(_at_share, chain, roomy, num, peak)
        first = 1.0
        while fits(at(first, "none")) is not None or any(_plans(name, at(first, "none")) for name in PLANNERS):
            first *= 0.9
        least = first
        while _plans("memflow", at(0.95 * least, "optimal")):
            least *= 0.95
        for share in dict.fromkeys((first, (first + least) / 2)):
            cluster = at(share, "none").cluster
            steps = {name: _timed(chain, cluster, num, name, "optimal", {})["step_s"] for name in ("memflow", "auto")}
            yield {
                "kind": "memflow", "chain": chain.name, "devices": num_devices, "microbatches": num, "budget": share,
                "fits_without_recompute": {name: _plans(name, at(share, "none")) for name in PLANNERS},
                "memflow_step_s": steps["memflow"], "auto_step_s": steps["auto"],
            }  # fmt: skip


def _at_share(
    chain: Chain, cluster: Cluster, num: int, peak_bytes: float, share: float, recompute: Recompute
) -> Problem:
    return Problem(chain, replace(cluster, memory_bytes=peak_bytes * share), num, recompute)


def ilp_rows() -> Iterator[Row]:
    """Small cases without recomputation: `auto` over 1F1B-n against what the periodic integer program can reach."""
    for chain in (gpt_like(4), amoebanet_like(6, batch=16), vgg_like(convs=(1, 1, 1, 1, 1))):
        roomy = Cluster(3, 1e15, V100_LINK)
        peak = max(plan_pipeline(chain, roomy, 12, planner="time", recompute="none").peak_bytes)
        for budget in BUDGETS:
            problem = Problem(chain, replace(roomy, memory_bytes=peak * budget), 12, "none")
            bound = ilp_bound_s(problem)
            try:
                step = plan_auto(problem, schedules=("1f1b-n",)).step_s
            except BudgetInfeasible:
                step = None
            yield {
                "kind": "ilp", "chain": chain.name, "devices": 3, "microbatches": 12, "budget": budget,
                "ilp_bound_s": bound if bound < float("inf") else None, "auto_step_s": step,
                "ratio": step / bound if step and bound < float("inf") else None,
                "optimum_s": fastest_by_enumeration(problem) if step else None,
            }  # fmt: skip


def ilp_bound_s(problem: Problem) -> float:
    """Over all contiguous allocations: m times the least period that the integer program finds, and no less than every
    stage's work and round trips with as many microbatches in flight as fit, after what comes before it. Infinite if
    nothing fits.
    """
    evaluator, cluster, count = problem.evaluator(), problem.cluster, len(problem.chain)
    m, num, levels = problem.num_microbatches, cluster.num_devices, (0,) * count
    cases = []
    for inner in itertools.combinations(range(1, count), num - 1):
        costs = evaluator.costs_of_levels((0, *inner, count), levels)
        fitting = [most_in_flight(cost, cluster.memory_bytes) for cost in costs]
        if min(fitting) >= 1:
            cases.append((least_step_s(costs, OneFOneBN(fitting, m), cluster), inner, costs))
    best = float("inf")
    for least, _, costs in sorted(cases):
        if least >= best:
            break
        program = PeriodicProgram(costs, range(num), cluster, problem.chain.input_bytes * m)
        found = shortest_period(program, best / m)
        best = min(best, max(least, m * found.period_s)) if found else best
    return best


def fastest_by_enumeration(problem: Problem) -> float:
    """The fastest 1F1B-n step over all cuts and all numbers in flight that don't rise from stage to stage; infinite if
    nothing fits."""
    evaluator, best = problem.evaluator(), float("inf")
    num, m, length = problem.cluster.num_devices, problem.num_microbatches, len(problem.chain)
    falling = itertools.combinations_with_replacement(range(m, 0, -1), num)
    makers = [OneFOneBN(counts, m) for counts in falling]
    for inner in itertools.combinations(range(1, length), num - 1):
        for maker in makers:
            found = evaluator.evaluate((0, *inner, length), maker, best)
            best = found.step_s if found else best
    return best


def most_in_flight(cost: StageCost, memory_bytes: float) -> int:
    """Microbatches of a stage that fit while the backward of one of them runs."""
    room = memory_bytes - cost.static_bytes - cost.backward_peak_bytes - cost.output_bytes
    return int(room // max(cost.saved_bytes + cost.input_bytes, 1.0))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("chain", "devices", "microbatches", "budget"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line (default: short text)")
    parser.add_argument("--quick", action="store_true", help="a few cells only")
    parser.add_argument("--only", choices=("largest", "memflow", "ilp", "step"), help="one part only")
    args = parser.parse_args()
    rows: list[Row] = []

    def emit(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row) if args.json else " ".join(f"{k}={v}" for k, v in row.items()), flush=True)

    if args.only in (None, "largest"):
        for row in largest_rows((4,) if args.quick else (4, 8)):
            emit(row)
    if args.only in (None, "memflow"):
        for row in memflow_rows():
            emit(row)
    if args.only in (None, "ilp"):
        for row in ilp_rows():
            emit(row)
    if args.only in (None, "step"):
        for row in step_rows(args.quick):
            emit(row)
        for row in list(summary_rows(rows)):
            emit(row)


if __name__ == "__main__":
    with clean_stdout():
        main()
