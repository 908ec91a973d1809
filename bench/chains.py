"""Chain planners against brute force and public peers on random chains: ``python -m bench.chains [--json]``.

Rows of three kinds. ``planner``: one chain planner over all random chains of one size class, its time over the best
possible (brute force over persistent schedules and moves). ``offload``: the offload planners against the best set of
values to move with everything saved, and the lower bound against the same. ``peer``: revolve's tables against the
public packages (skipped, and said so, where one is not installed).
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxmem.planners.chains import CHAIN_PLANNERS, Chain, judge, simulate
from fxmem.planners.chains.brute import best_joint, best_offload, persistent_s
from fxmem.planners.chains.offload import lower_bound_s
from fxmem.planners.chains.revolve import disk_table, extra_forwards, opt_table
from fxmem.planners.chains.tree import compute_actions, save_everything

Row = dict[str, Any]


def random_chain(rng: random.Random, num_blocks: int) -> Chain:
    """A heterogeneous chain: outputs of 1-20 bytes, saved sets up to 60 more; moving all takes 0.25-4 computes."""
    a = [rng.randint(1, 20) for _ in range(num_blocks + 1)]
    u = [rng.uniform(0.2, 2.0) for _ in range(num_blocks)]
    v = [x * rng.uniform(1.5, 2.5) for x in u]
    abar = [a[i + 1] + rng.randint(0, 60) for i in range(num_blocks)]
    wf, wb = ([rng.randint(0, 10) for _ in range(num_blocks)] for _ in range(2))
    rho = rng.choice([0.25, 0.5, 1.0, 2.0, 4.0])
    beta = sum(abar) / (rho * (sum(u) + sum(v)))
    return Chain(tuple(u), tuple(v), tuple(a), tuple(abar), tuple(wf), tuple(wb), beta=beta)


def random_cases(seed: int, count: int, low: int, high: int, floor: float) -> Iterator[tuple[Chain, int]]:
    """``count`` chains of ``low .. high`` blocks with budgets between ``floor`` and 0.98 of the all-saved peak."""
    rng = random.Random(seed)
    for _ in range(count):
        chain = random_chain(rng, rng.randint(low, high))
        full = simulate(chain, compute_actions(save_everything(chain))).peak_bytes
        yield chain, int(full * rng.uniform(floor, 0.98))


def _summary(ratios: Sequence[float]) -> Row:
    if not ratios:
        return {"cases": 0, "mean_ratio": None, "worst_ratio": None, "optimal_share": None}
    return {
        "cases": len(ratios),
        "mean_ratio": sum(ratios) / len(ratios),
        "worst_ratio": max(ratios),
        "optimal_share": sum(r < 1 + 1e-9 for r in ratios) / len(ratios),
    }


def planner_rows(seed: int, count: int) -> Iterator[Row]:
    """Every chain planner against the joint brute force, and rotor against the search over persistent schedules."""
    ratios, seconds, missed = (
        defaultdict[str, list[float]](list),
        defaultdict[str, float](float),
        defaultdict[str, int](int),
    )
    for chain, budget in random_cases(seed, count, 3, 5, 0.4):
        references = {"joint": best_joint(chain, budget), "persistent": persistent_s(chain, budget)}
        for name in CHAIN_PLANNERS:
            start = time.perf_counter()
            plan = judge(name, chain, budget)
            seconds[name] += time.perf_counter() - start
            for against, best_s in references.items():
                key = f"{name}/{against}"
                if plan is not None:
                    ratios[key].append(plan.time_s / best_s)
                elif best_s < math.inf:
                    missed[key] += 1
    for name in CHAIN_PLANNERS:
        for against in ("joint", "persistent"):
            if against == "joint" or name == "rotor":
                key = f"{name}/{against}"
                row = {"kind": "planner", "planner": name, "against": against, "missed": missed[key]}
                yield row | _summary(ratios[key]) | {"solve_s": seconds[name] / count}


def offload_rows(seed: int, count: int) -> Iterator[Row]:
    """The offload planners and their bound against the best set of values to move (everything saved)."""
    ratios = defaultdict[str, list[float]](list)
    for chain, budget in random_cases(seed, 10 * count, 3, 9, 0.5):
        best_s = best_offload(chain, budget)
        if best_s == math.inf:
            continue
        for name in ("offload-greedy", "offload-dp", "offload-all"):
            plan = judge(name, chain, budget)
            ratios[name].append(math.inf if plan is None else plan.time_s / best_s)
        ratios["bound"].append(lower_bound_s(chain, budget) / best_s)
        if len(ratios["bound"]) == count:
            break
    for name, values in ratios.items():
        yield {"kind": "offload", "planner": name, "against": "selection"} | _summary(values)


def _agreement(peer: str, ours: Callable[[int, int], float], theirs: Callable[[int, int], float]) -> Row:
    pairs = [(ours(n, s), theirs(n, s)) for n in range(2, 71) for s in range(1, 9)]
    return {"kind": "peer", "peer": peer, "cases": len(pairs), "equal": sum(abs(x - y) < 1e-9 for x, y in pairs)}


def peer_rows() -> Iterator[Row]:
    """revolve against its closed form, checkpoint-schedules and pyrevolve; disk-revolve against the first of these."""
    table = opt_table(69, 8, 1.0, 1.0)

    def ours(n: int, s: int) -> float:
        return float(table[s, n - 1]) - n

    yield _agreement("closed form", ours, extra_forwards)
    try:
        from checkpoint_schedules.hrevolve_sequences.disk_revolve import get_opt_inf_table
        from checkpoint_schedules.hrevolve_sequences.revolve import get_opt_0_table
    except ImportError:
        yield {"kind": "peer", "peer": "checkpoint-schedules", "skipped": "not installed"}
    else:
        peer = get_opt_0_table(69, 8, 1.0, 1.0)
        yield _agreement("checkpoint-schedules revolve", ours, lambda n, s: float(peer[s][n - 1]) - n)
        rows = [disk_table(table[: s + 1], 1.0, 1.0, 2.0, 3.0) for s in range(9)]
        disk = [get_opt_inf_table(69, max(s, 1), 1.0, 1.0, 3.0, 2.0, True) for s in range(9)]
        yield _agreement(
            "checkpoint-schedules disk-revolve", lambda n, s: float(rows[s][n - 1]), lambda n, s: float(disk[s][n - 1])
        )
    try:
        numforw = importlib.import_module("pyrevolve.crevolve").numforw  # ships no types
    except ImportError:
        yield {"kind": "peer", "peer": "pyrevolve", "skipped": "not installed"}
    else:
        yield _agreement("pyrevolve", ours, lambda n, s: float(numforw(n, s)))


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list instead of lines")
    parser.add_argument("--cases", type=int, default=60, help="random chains for the joint brute force")
    parser.add_argument("--offload-cases", type=int, default=400, help="random chains for the offload planners")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [
        *peer_rows(),
        *offload_rows(args.seed, args.offload_cases),
        *planner_rows(args.seed, args.cases),
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        print(
            "  ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )


if __name__ == "__main__":
    main()
