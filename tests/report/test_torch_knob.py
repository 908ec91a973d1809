"""torch's own activation_memory_budget beside a plan: predicted as it is measured, drawn where it was asked for."""

import pytest
from click.testing import CliRunner

import fxmem
from bench.versus_torch import TorchSweep, measured_bytes
from fxmem.cli import main
from fxmem.errors import PlanMismatch
from fxmem.planners.plan import Plan
from fxmem.units import format_bytes
from tests.models import blocks
from tests.report.page import Page

SETTINGS = (0.0, 0.4, 1.0)


@pytest.fixture(scope="module")
def plan() -> Plan:
    module, args = blocks()
    return fxmem.plan(module, args, None)


@pytest.mark.slow
def test_the_prediction_is_what_torch_needs(plan):
    module, args = blocks()
    torch_side = TorchSweep(module)
    torch_side.run(*args)
    for setting, made in zip(SETTINGS, plan.torch_plans(SETTINGS), strict=True):
        torch_side.set_budget(setting)
        assert made.peak_bytes == measured_bytes(module, torch_side.run, args)
        assert made.planner == f"torch activation_memory_budget {setting:g}"
        assert made.extra_s >= 0


def test_the_page_shows_them_where_they_are_asked_for(plan, tmp_path):
    beside = plan.torch_plans(SETTINGS)
    plan.report(tmp_path / "with.html", beside)
    page = Page(tmp_path / "with.html")
    for made in beside:
        assert made.planner in page.text
        assert format_bytes(made.peak_bytes) in page.text
    plan.report(tmp_path / "without.html")
    assert "activation_memory_budget" not in Page(tmp_path / "without.html").text


def test_a_plan_without_the_captured_graph_says_so(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatch, match="captured graph"):
        Plan.load(tmp_path / "plan.json").torch_plans()


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    report = tmp_path / "report.html"
    command = ["plan", "gpt2", "--size", "tiny", "--budget", "0.9", "--device", "cpu", "--report", str(report)]
    done = CliRunner().invoke(main, [*command, "--versus-torch"])
    assert done.exit_code == 0, done.output
    assert "torch's activation_memory_budget on this step" in done.output
    assert "torch activation_memory_budget 0.5" in Page(report).text
