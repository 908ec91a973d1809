"""Every example runs, and what it asserts holds."""

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
NEEDS = {"hf_trainer": ("transformers", "accelerate"), "accelerate_loop": ("accelerate",), "lora": ("transformers",)}
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


def test_the_readme_names_every_example():
    named = set(re.findall(r"`(\w+)\.py`", (EXAMPLES / "README.md").read_text()))
    assert named == {*ALONE, *SEVERAL}
