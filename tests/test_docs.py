"""Code in the documentation is run: blocks in order, in one namespace a page; `# raises X` is held to."""

import re
from pathlib import Path

import pytest

import fxmem

DOCS = Path(__file__).parents[1] / "docs"
RAISES = re.compile(r"# raises (\w+)\s*$")
PAGES = ("troubleshooting.md", "tutorial.md")


def run_page(text):
    names = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        expected = RAISES.search(block)
        code = compile(block, "docs", "exec")
        if expected is None:
            exec(code, names)
            continue
        with pytest.raises(getattr(fxmem, expected[1])):
            exec(code, names)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / page).read_text()
    assert "```python" in text
    run_page(text)


def test_every_public_error_has_a_section():
    sections = set(re.findall(r"^## (\w+)$", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE))
    folders = (DOCS.parent / "fxmem", DOCS.parent / "passes")
    sources = (path.read_text() for folder in folders for path in folder.rglob("*.py"))
    named = {name for text in sources for name in re.findall(r"^class (\w+)\(FxmemError", text, flags=re.MULTILINE)}
    assert named > {"BudgetInfeasible", "CutError"}
    assert named | {"FxmemError"} <= sections


def test_a_block_that_does_not_raise_is_a_failure():
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        run_page("```python\nx = 1  # raises OptionError\n```")


def test_a_block_that_fails_is_a_failure():
    with pytest.raises(ZeroDivisionError):
        run_page("```python\n1 / 0\n```")
