"""Every example runs, and what it asserts holds."""

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SEVERAL = ("ddp", "fsdp", "pipeline")
NEEDS = {
    "hf_trainer": ("transformers", "accelerate"), "accelerate_loop": ("accelerate",), "lora": ("transformers",),
    "lightning_loop": ("lightning",),
}  # fmt: skip
ALONE = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in SEVERAL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the trainers themselves
@pytest.mark.parametrize("name", ALONE)
def test_example(name, capsys):
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module)
    if name == "accelerate_loop":
        import accelerate

        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    assert capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", ["PEFT", "hand"])
def test_lora_either_way(by, capsys, monkeypatch):
    pytest.importorskip("transformers")
    if by == "PEFT":
        pytest.importorskip("peft")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    runpy.run_path(str(EXAMPLES / "lora.py"))["main"]()
    assert f"adapters by {by}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pages = shown_by(EXAMPLES / "notebook.ipynb", tmp_path)
    assert sum("<iframe" in page for page in pages) == 1


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", SEVERAL)
def test_example_on_two_ranks(name):
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(EXAMPLES / f"{name}.py")],
        env={**os.environ, **settings}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"rank 0", "rank 1"} == set(re.findall(r"rank [01]", done.stdout))


def shown_by(notebook, folder):
    """What the cells of a notebook show as HTML: run by nbclient if it is here, else by this process."""
    if importlib.util.find_spec("nbclient") and importlib.util.find_spec("ipykernel"):
        import nbclient
        import nbformat

        place = {"metadata": {"path": folder}}
        made = nbclient.NotebookClient(nbformat.read(notebook, 4), timeout=600, resources=place).execute()
        outputs = [output for cell in made.cells for output in cell.get("outputs", ())]
        return [output.get("data", {}).get("text/html", "") for output in outputs]
    names, shown = {}, []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            shown.append(run_cell("".join(cell["source"]), names))
    return [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]


def run_cell(source, names):
    """Run a cell; the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)


def test_the_readme_names_every_example():
    named = set(re.findall(r"`(\w+\.(?:py|ipynb))`", (EXAMPLES / "README.md").read_text()))
    assert named == {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
