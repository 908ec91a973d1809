"""The frozen outcome of pipeline planning: cuts, recomputation, schedule, and what the simulator says of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fxmem.errors import PlanMismatch
from fxmem.pipelining.chain import Chain, Cluster
from fxmem.pipelining.evaluate import Candidate, Evaluator
from fxmem.pipelining.schedules import Schedule, parse_actions
from fxmem.pipelining.simulate import Simulation, StageCost, simulate
from fxmem.units import format_bytes


@dataclass(frozen=True)
class StagePlan:
    """One stage: blocks [first, last), the option of each, where it runs and how many microbatches it keeps."""

    first: int
    last: int
    device: int
    levels: tuple[int, ...]
    in_flight: int
    cost: StageCost

    @property
    def busy_s(self) -> float:
        """Seconds of forward and backward of one microbatch, recomputation included."""
        return self.cost.forward_s + self.cost.backward_s


@dataclass(frozen=True)
class PipelinePlan:
    """A simulated pipeline plan; `peak_bytes` are per device, `bound_s` is a proven lower bound on any step
    searched.
    """

    planner: str
    chain_name: str
    num_microbatches: int
    budget_bytes: float
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    step_s: float
    peak_bytes: tuple[float, ...]
    busy_s: tuple[float, ...]
    bound_s: float
    solve_s: float

    @property
    def cuts(self) -> tuple[int, ...]:
        return (0, *(stage.last for stage in self.stages))

    @property
    def levels(self) -> tuple[int, ...]:
        """The option of every block."""
        return tuple(level for stage in self.stages for level in stage.levels)

    @property
    def gap(self) -> float:
        """How far the step may be from the best possible, relative to the bound."""
        return self.step_s / self.bound_s - 1

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)

    def simulate(self, cluster: Cluster, input_bytes: float = 0.0) -> Simulation:
        """Run the plan's own action list again."""
        return simulate(self.schedule, [stage.cost for stage in self.stages], cluster, input_bytes)

    def __str__(self) -> str:
        head = (
            f"{self.planner}: {self.chain_name}, {self.num_microbatches} microbatches, {self.schedule.name}, "
            f"step {self.step_s:.4f} s (bound {self.bound_s:.4f} s, gap {self.gap:.1%}), bubble {self.bubble:.1%}, "
            f"budget {format_bytes(self.budget_bytes)}"
        )
        rows = [
            f"  stage {number}: blocks {stage.first}..{stage.last - 1} on device {stage.device}, "
            f"{stage.busy_s:.4f} s per microbatch, {stage.in_flight} in flight, "
            f"recompute {sum(level > 0 for level in stage.levels)} of {len(stage.levels)} blocks"
            for number, stage in enumerate(self.stages)
        ]
        peaks = [
            f"  device {d}: peak {format_bytes(peak)}, busy {busy:.4f} s"
            for d, (peak, busy) in enumerate(zip(self.peak_bytes, self.busy_s, strict=True))
        ]
        return "\n".join([head, *rows, *peaks])

    def to_json(self) -> str:
        data = {
            name: getattr(self, name)
            for name in (
                "planner",
                "chain_name",
                "num_microbatches",
                "budget_bytes",
                "step_s",
                "peak_bytes",
                "busy_s",
                "bound_s",
                "solve_s",
            )
        }
        data["stages"] = [
            {
                "first": s.first,
                "last": s.last,
                "device": s.device,
                "levels": s.levels,
                "in_flight": s.in_flight,
                "cost": s.cost._asdict(),
            }
            for s in self.stages
        ]
        data["schedule"] = {"name": self.schedule.name, "actions": self.schedule.as_csv_rows()}
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> PipelinePlan:
        data = json.loads(text)
        rows = tuple(parse_actions(row) for row in data["schedule"]["actions"])
        device_of = tuple(stage["device"] for stage in data["stages"])
        schedule = Schedule(data["schedule"]["name"], data["num_microbatches"], device_of, rows)
        stages = tuple(
            StagePlan(s["first"], s["last"], s["device"], tuple(s["levels"]), s["in_flight"], StageCost(**s["cost"]))
            for s in data["stages"]
        )
        fields = {
            name: value for name, value in data.items() if name not in ("stages", "schedule", "peak_bytes", "busy_s")
        }
        return PipelinePlan(
            **fields,
            stages=stages,
            schedule=schedule,
            peak_bytes=tuple(data["peak_bytes"]),
            busy_s=tuple(data["busy_s"]),
        )

    def verify(self, chain: Chain, cluster: Cluster) -> None:
        """Raise PlanMismatch unless the plan fits `chain` and its simulation on `cluster` gives the plan's own
        numbers.
        """
        if self.cuts[-1] != len(chain) or list(self.cuts) != sorted(set(self.cuts)):
            raise PlanMismatch(f"the plan cuts {self.cuts[-1]} blocks, the chain has {len(chain)}")
        again = self.simulate(cluster, chain.input_bytes)
        if abs(again.step_s - self.step_s) > 1e-9 * self.step_s or max(again.peak_bytes) > self.budget_bytes * (
            1 + 1e-12
        ):
            raise PlanMismatch(
                f"the simulator says {again.step_s} s and {max(again.peak_bytes)} bytes, "
                f"the plan {self.step_s} s under {self.budget_bytes}"
            )


def make_plan(planner: str, evaluator: Evaluator, candidate: Candidate, bound_s: float, solve_s: float) -> PipelinePlan:
    """Freeze a candidate; simulates it once more for its busy times."""
    costs = evaluator.costs_of_levels(candidate.cuts, candidate.levels)
    schedule, chain = candidate.schedule, evaluator.chain
    run = simulate(schedule, costs, evaluator.cluster, chain.input_bytes)
    stages = _stages(candidate, costs)
    return PipelinePlan(
        planner, chain.name, schedule.num_microbatches, evaluator.cluster.memory_bytes, stages, schedule,
        run.step_s, run.peak_bytes, run.busy_s, bound_s, solve_s,
    )  # fmt: skip


def _stages(candidate: Candidate, costs: Sequence[StageCost]) -> tuple[StagePlan, ...]:
    schedule = candidate.schedule
    spans = zip(candidate.cuts, candidate.cuts[1:], strict=False)
    return tuple(
        StagePlan(i, j, schedule.device_of[s], candidate.levels[i:j], schedule.in_flight_of_stage[s], costs[s])
        for s, (i, j) in enumerate(spans)
    )
