"""mCAP: memory-balanced partitioning from profiled peaks (Dreuning, Bal, van Nieuwpoort, Euro-Par 2022,
10.1007/978-3-031-12597-3_10).

A layer's statistics are iso(l), the peak of a device that holds it alone, and add(l), what it adds behind its
predecessors; a stage is predicted as iso(first) + sum of add. `profile_runs` is the paper's incremental order, whose
readings mix the in-flight counts of the devices they came from; `mcap` measures one layer at a time in a single process
at two in-flight counts (each statistic is linear in them) and predicts every stage at its own. Both recommend by the
exact min-max program.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from fxmem.errors import OptionError
from fxmem.pipelining.chain import FloatArray
from fxmem.pipelining.curves import Recompute, StageTable
from fxmem.pipelining.evaluate import Cuts, Evaluator
from fxmem.pipelining.partition.base import Clock, Problem, best_of, finish
from fxmem.pipelining.partition.proposals import in_flight_of, min_max
from fxmem.pipelining.plan import PipelinePlan

Profile = Callable[[int, int, int], float]
"""Peak bytes of a device that holds blocks [i, j) with so many microbatches in flight."""


def profile_of(problem: Problem) -> Profile:
    """The profiler, in the recomputation mode that will be used (all of it, if stages may choose)."""
    recompute: Recompute = "none" if problem.recompute == "none" else "full"
    table = StageTable(Evaluator(problem.chain, problem.cluster, recompute).curves, np.inf, 0.0)
    return lambda i, j, in_flight: float(table.least(in_flight)[i, j])


def profile_runs(num_layers: int, num_devices: int) -> Iterator[Cuts]:
    """The paper's incremental runs, as cuts: devices filled with q layers up to l, [l] alone, the rest spread evenly.

    Needs num_layers >= 2 num_devices - 2 (OptionError otherwise); two more runs fix the first and the last layers.
    """
    if num_devices < 2 or num_layers < max(2 * num_devices - 2, 2):
        raise OptionError(
            f"incremental profiling needs 2 devices or more and {2 * num_devices - 2} layers, "
            f"not {num_devices} and {num_layers}"
        )
    if num_devices == 2:
        yield from ((0, split, num_layers) for split in range(1, num_layers))
        return
    per_device = (num_layers - 2) // (num_devices - 2) + 1
    for layer in range(1, num_layers - 1):
        filled = [*range(0, layer, per_device), layer, layer + 1]
        yield from _spread(filled, num_layers, num_devices)
    yield from _spread([0, 1], num_layers, num_devices)
    yield (*np.linspace(0, num_layers - 1, num_devices).round().astype(int).tolist(), num_layers)


def _spread(filled: list[int], num_layers: int, num_devices: int) -> Iterator[Cuts]:
    """Cuts that start with `filled` and spread the remaining layers over the remaining devices, if any are left for
    them.
    """
    devices, layers = num_devices - (len(filled) - 1), num_layers - filled[-1]
    if devices < 1:
        return
    used = min(devices, layers)
    tail = [filled[-1] + round(layers * part / used) for part in range(1, used + 1)]
    yield tuple(filled + tail)


def paper_statistics(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """iso and add of every layer, averaged over the runs (and so over the devices) that show them."""
    profile, num = profile_of(problem), problem.cluster.num_devices
    peaks: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cuts in profile_runs(len(problem.chain), num):
        for device, span in enumerate(itertools.pairwise(cuts)):
            peaks[span].append(profile(*span, min(num - device, problem.num_microbatches)))
    mean = {span: sum(values) / len(values) for span, values in peaks.items()}
    iso, add = np.zeros(len(problem.chain)), np.zeros(len(problem.chain))
    for layer in range(len(problem.chain)):
        gains = [
            mean[i, layer + 1] - mean[i, layer] for i in range(layer) if (i, layer + 1) in mean and (i, layer) in mean
        ]
        alone = mean.get((layer, layer + 1))
        add[layer] = sum(gains) / len(gains) if gains else (alone or 0.0)
        iso[layer] = add[layer] if alone is None else alone
    return iso, add


def stage_aware_statistics(problem: Problem, in_flight: int) -> tuple[FloatArray, FloatArray]:
    """iso and add at `in_flight`, extrapolated from profiles of one and two microbatches in flight."""
    profile, length = profile_of(problem), len(problem.chain)

    def at(count: int) -> tuple[FloatArray, FloatArray]:
        iso = np.array([profile(layer, layer + 1, count) for layer in range(length)])
        pairs = [profile(layer - 1, layer + 1, count) - profile(layer - 1, layer, count) for layer in range(1, length)]
        return iso, np.array([iso[0], *pairs])

    (iso_1, add_1), (iso_2, add_2) = at(1), at(2)
    return iso_1 + (in_flight - 1) * (iso_2 - iso_1), add_1 + (in_flight - 1) * (add_2 - add_1)


def predictions(iso: FloatArray, add: FloatArray) -> FloatArray:
    """predict(stage [i, j)) = iso(i) + add(i + 1) + ... + add(j - 1), [L, L + 1]."""
    sums = np.concatenate([[0.0], np.cumsum(add)])
    return np.asarray(iso[:, None] - add[:, None] + sums[None, :] - sums[:-1, None], dtype=float)


def mcap_cuts(problem: Problem, *, stage_aware: bool = True) -> Cuts:
    """The cuts whose largest predicted peak is least."""
    num = problem.cluster.num_devices
    if not stage_aware:
        return min_max(predictions(*paper_statistics(problem)), num)
    counts = in_flight_of(1.0, num, problem.num_microbatches)
    return min_max([predictions(*stage_aware_statistics(problem, n)) for n in counts], num)


def plan_mcap(problem: Problem) -> PipelinePlan:
    """Memory-balanced cuts from stage-aware statistics, under 1F1B."""
    clock, evaluator = Clock(), problem.evaluator()
    candidate = best_of(evaluator, [(mcap_cuts(problem), problem.standard)])
    return finish("mcap", problem, evaluator, candidate, clock)


def plan_mcap_paper(problem: Problem) -> PipelinePlan:
    """Memory-balanced cuts from the paper's incremental profiling, under 1F1B."""
    clock, evaluator = Clock(), problem.evaluator()
    candidate = best_of(evaluator, [(mcap_cuts(problem, stage_aware=False), problem.standard)])
    return finish("mcap-paper", problem, evaluator, candidate, clock)
