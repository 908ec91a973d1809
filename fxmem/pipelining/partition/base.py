"""What all partitioners share: the problem, plans from fixed cuts, and the error when nothing fits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fxmem.errors import BudgetInfeasible, OptionError
from fxmem.pipelining.bound import lower_bound_s
from fxmem.pipelining.chain import Chain, Cluster
from fxmem.pipelining.curves import Recompute, StageTable
from fxmem.pipelining.evaluate import Candidate, Cuts, Evaluator, OneFOneBN, ScheduleMaker
from fxmem.pipelining.partition.proposals import in_flight_of, least_memory
from fxmem.pipelining.plan import PipelinePlan, make_plan


@dataclass(frozen=True)
class Problem:
    """Cut `chain` over `cluster` for `num_microbatches`; `recompute` says what stages may drop."""

    chain: Chain
    cluster: Cluster
    num_microbatches: int
    recompute: Recompute = "optimal"

    def __post_init__(self) -> None:
        if len(self.chain) < self.cluster.num_devices:
            raise OptionError(
                f"{self.chain.name!r} has {len(self.chain)} blocks: too few for {self.cluster.num_devices} stages"
            )
        if self.num_microbatches < 1:
            raise OptionError(f"a step needs at least one microbatch, not {self.num_microbatches}")

    def evaluator(self) -> Evaluator:
        return Evaluator(self.chain, self.cluster, self.recompute)

    def table(self, evaluator: Evaluator) -> StageTable:
        return StageTable(evaluator.curves, self.cluster.memory_bytes, self.chain.input_bytes * self.num_microbatches)

    @property
    def standard(self) -> OneFOneBN:
        """1F1B's own in-flight counts."""
        return OneFOneBN(in_flight_of(1.0, self.cluster.num_devices, self.num_microbatches), self.num_microbatches)


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._start


def best_of(evaluator: Evaluator, tries: Iterable[tuple[Cuts, ScheduleMaker]]) -> Candidate | None:
    """The fastest candidate that fits among (cuts, schedule) pairs; () as cuts is skipped."""
    best: Candidate | None = None
    for cuts, maker in tries:
        if cuts:
            best = evaluator.evaluate(cuts, maker, best.step_s if best else float("inf")) or best
    return best


def finish(
    name: str,
    problem: Problem,
    evaluator: Evaluator,
    candidate: Candidate | None,
    clock: Clock,
    *,
    interleaved: bool = False,
) -> PipelinePlan:
    """The plan of `candidate` with its lower bound; raises BudgetInfeasible if there is none."""
    if candidate is None:
        raise infeasible(problem, evaluator)
    bound = lower_bound_s(
        problem.chain, problem.cluster, problem.num_microbatches,
        recompute=problem.recompute, split=candidate.schedule.is_split, interleaved=interleaved,
    )  # fmt: skip
    return make_plan(name, evaluator, candidate, bound, clock())


def infeasible(
    problem: Problem, evaluator: Evaluator, cuts: Cuts = (), maker: ScheduleMaker | None = None
) -> BudgetInfeasible:
    """Name the stage that needs most when all recompute what they can with one microbatch in flight (or under
    `cuts`).
    """
    ones = OneFOneBN([1] * problem.cluster.num_devices, problem.num_microbatches)
    maker = maker or ones
    cuts = cuts or least_memory(problem.table(evaluator), [1] * problem.cluster.num_devices)
    levels = least_levels(evaluator, cuts, maker)
    lean = evaluator.simulate_levels(cuts, maker, levels)
    assert lean is not None, "no time limit was given"
    device = int(np.argmax(lean.peak_bytes))
    costs = evaluator.costs_of_levels(cuts, levels)
    rows: list[tuple[str, int]] = []
    for stage in lean.schedule.stages_on[device]:
        where, cost = f"stage {stage} (blocks {cuts[stage]}..{cuts[stage + 1] - 1})", costs[stage]
        rows.append((f"{where}: weights, gradients, optimizer", int(cost.static_bytes)))
        rows.append((f"{where}: saved per microbatch", int(cost.saved_bytes + cost.input_bytes)))
        rows.append((f"{where}: transient", int(max(cost.forward_peak_bytes, cost.backward_peak_bytes))))
    return BudgetInfeasible(
        int(problem.cluster.memory_bytes),
        int(np.ceil(max(lean.peak_bytes))),
        rows,
        f" on device {device} of {problem.cluster.num_devices}",
    )


def least_levels(evaluator: Evaluator, cuts: Sequence[int], maker: ScheduleMaker) -> tuple[int, ...]:
    """Each device's state of fewest bytes."""
    levels = np.zeros(len(evaluator.chain), dtype=np.intp)
    for device in evaluator.devices(tuple(cuts), maker):
        blocks = np.concatenate([np.arange(i, j) for i, j in device.curve.spans])
        levels[blocks] = device.curve.levels[int(device.need.argmin())]
    return tuple(levels.tolist())
