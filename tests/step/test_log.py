"""What a compiled step says through `logging`."""

import logging
import re

import pytest

import fxmem
from fxmem.options import settings
from fxmem.units import format_bytes
from tests.models import blocks


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "fxmem"]


def test_one_line_at_the_first_step(caplog):
    module, args = blocks()
    step = fxmem.compile(module, budget=0.9, planner="sqrt")
    with caplog.at_level(logging.INFO, "fxmem"):
        for _ in range(3):
            module.zero_grad()
            step(*args).backward()
        state = fxmem.step_of(step)
        measured = state.measured_peak_bytes
    (line,) = [line for line in lines(caplog) if line.startswith("first step")]
    assert f"budget {format_bytes(state.budget_bytes)}" in line
    assert f"predicted {format_bytes(state.plan.peak_bytes)}" in line
    found = re.search(r"measured ([\d.]+) KiB", line)  # of the first step, in which something was compiled
    assert found is not None
    assert float(found[1]) * 1024 == pytest.approx(measured, rel=1e-3)
    assert "more op time for" in line
    assert "ops run again" in line


def test_nothing_is_said_at_the_usual_level(caplog):
    module, args = blocks()
    with caplog.at_level(logging.WARNING, "fxmem"):
        step = fxmem.compile(module)
        step(*args).backward()
        assert step.plans
    assert lines(caplog) == []


def test_without_a_budget_the_line_says_so(caplog):
    module, args = blocks()
    step = fxmem.compile(module)
    with caplog.at_level(logging.INFO, "fxmem"):
        step(*args).backward()
        assert step.plans
    (line,) = lines(caplog)
    assert "no budget" in line
    assert "not measured" in line


def test_what_is_moved_is_named():
    from fxmem.report.text import line

    module, args = blocks(batch=1024)
    plan = fxmem.plan(module, args, "min", tiers="host", device_spec="h100-80g", planner="offload-all", solve_s=0.1)
    assert f"{format_bytes(plan.simulation.bytes_moved)} moved to the host and back" in line(plan, None)


def test_a_warning_names_the_remedy(caplog):
    settings(tiers="auto", offload_dir="/nowhere/at/all")
    (line,) = lines(caplog)
    assert "offload_dir=" in line
