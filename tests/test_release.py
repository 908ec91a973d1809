"""What a release and a report of a fault need: one version everywhere, templates that ask for the doctor's findings."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import fxmem
from fxmem.cli import main

ROOT = Path(__file__).parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_one_version():
    assert fxmem.__version__ == VERSION
    assert re.search(rf"^version: {re.escape(VERSION)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert VERSION in CliRunner().invoke(main, ["--version"]).output


def test_the_doctor_tells_what_a_report_needs(tmp_path):
    result = CliRunner().invoke(main, ["doctor", "--json", "--offload-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["fxmem"] == VERSION
    assert {"python", "torch", "platform", "devices", "host_free_bytes", "disk_free_bytes"} <= found.keys()


@pytest.mark.parametrize("name", ["bug_report.yml", "feature_request.yml"])
def test_templates_ask_for_it(name):
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text())
    assert {"name", "description", "body"} <= form.keys()
    labels = [field["attributes"]["label"] for field in form["body"]]
    assert any("fxmem doctor --json" in label for label in labels)


def test_the_citation_is_yaml():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "license"} <= cited.keys()
