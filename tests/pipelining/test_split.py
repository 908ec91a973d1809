"""Stages with regions in parts: what that buys, when it is done, and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fxmem
from fxmem.capture import capture
from fxmem.errors import BudgetInfeasible, OptionError, PlanMismatch
from fxmem.ir.program import Fission
from fxmem.passes.stage_split import StageGraph, split_stages
from fxmem.pipelining.stage_forms import split_stage
from fxmem.runtime.pipeline.code import stage_program
from fxmem.step.candidates import Candidates
from tests.distributed.ranks import build


def pipeline(budget: float | str | None, **options: object) -> fxmem.PlannedPipeline:
    model, args = build("tagger")
    chosen: dict[str, object] = {"num_stages": 2, "num_microbatches": 4, "schedule": "1f1b", "solve_s": 0.1} | options
    return fxmem.pipeline(model, args, budget, device_spec="cpu", **chosen)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_smallest_budget_falls_where_the_loss_is_what_takes_memory() -> None:
    whole, split = pipeline("min", fission="off").plan, pipeline("min").plan
    assert max(split.peak_bytes) < 0.4 * max(whole.peak_bytes)
    assert [bool(stage.split) for stage in split.stages] == [False, True]
    assert "split: aten." in str(split)
    with pytest.raises(BudgetInfeasible):
        pipeline(0.6, fission="off")
    plan = pipeline(0.6).plan
    assert plan.budget_bytes is not None
    assert max(plan.peak_bytes) <= plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, 1.0, 0.995])
def test_stages_that_fit_whole_stay_whole_unless_that_is_slower(budget: float | None) -> None:
    whole, split = pipeline(budget, fission="off").plan, pipeline(budget).plan
    assert split.step_s <= whole.step_s
    assert whole.stages[1].extra_s or not any(stage.split for stage in split.stages)


def test_only_the_default_stage_planner_splits_and_regions_are_not_named() -> None:
    with pytest.raises(BudgetInfeasible):
        pipeline(0.6, stage_planner="sqrt")
    with pytest.raises(OptionError, match="'auto' or 'off'"):
        pipeline(None, fission=())


def test_a_region_is_split_alike_in_microbatches_of_other_sizes() -> None:
    two, three = last_stage(2), last_stage(3)
    (fissions, *_) = Candidates(two.joint, stage_program(two)).fissions
    made = [split_stage(stage, fissions).joint for stage in (two, three)]
    assert [n.target for n in made[0].nodes] == [n.target for n in made[1].nodes]
    with pytest.raises(PlanMismatch):
        split_stage(last_stage(1), tuple(map(in_single_rows, fissions)))


def last_stage(rows: int) -> StageGraph:
    model, args = build("tagger")
    (joint,) = capture(model, tuple(a[:rows] for a in args), frontend="aot")
    cut = [n.name for n in joint.nodes].index("native_layer_norm_3")
    return split_stages(joint, [cut])[-1]


def in_single_rows(fission: Fission) -> Fission:
    return replace(fission, offsets=tuple(range(fission.size + 1)))
