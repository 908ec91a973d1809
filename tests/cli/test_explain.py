"""`fxmem explain`: of a model, and of a script that knows nothing of fxmem."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import fxmem
from fxmem.cli import main
from fxmem.cli.edits import apply_edits, edits
from fxmem.cli.first_backward import Place, first_step
from fxmem.errors import OptionError
from tests.models import blocks

ROOT = Path(__file__).parents[2]

SCRIPT = '''"""Trains something."""

import torch
from torch import nn

torch.manual_seed(0)
head = nn.Linear(64, 1)
model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)),
)
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    x = torch.randn(256, 64)
    with torch.no_grad():
        head(x)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step)
'''


def built():
    return blocks()


def run(*arguments):
    return CliRunner().invoke(main, ["explain", *map(str, arguments)])


def written(folder, text):
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_a_model():
    result = run("tests.cli.test_explain:built", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["largest"]) == 10
    assert [row["bytes"] for row in found["largest"]] == sorted(
        (row["bytes"] for row in found["largest"]), reverse=True
    )
    assert any(row["module"].startswith("blocks.") and "models.py:27" in row["line"] for row in found["largest"])
    assert 0 < len(found["ways"]) <= 3
    shares = [way["extra_share"] for way in found["ways"]]
    assert shares == sorted(shares)
    assert all(way["peak_bytes"] < found["peak_bytes"] for way in found["ways"])
    assert found["half_batch_bytes"] < found["peak_bytes"]


def wide():
    torch.manual_seed(0)
    head = nn.Linear(16, 2048, bias=False)
    loss = nn.CrossEntropyLoss()
    return lambda x, labels: loss(head(x), labels), (torch.randn(256, 16), torch.randint(2048, (256,)))


def test_ways_are_those_of_compile_splitting_included():
    result = run("tests.cli.test_explain:wide", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    split = [way for way in found["ways"] if "parts" in way["what"]]
    assert split
    function, args = wide()
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.plan(function, args, split[0]["peak_bytes"], fission="off")
    assert found["min_bytes"] == min(way["peak_bytes"] for way in found["ways"])


def test_in_words_at_80_columns():
    result = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["explain", "tests.cli.test_explain:built"])
    assert result.exit_code == 0, result.output
    for words in ("at its peak", "the largest that stand there", "ways lower", "Half the batch", "fxmem.compile(model"):
        assert words in result.output
    assert "…" not in result.output


def test_a_script_is_run_until_its_first_backward(tmp_path):
    result = run(written(tmp_path, SCRIPT), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    first, second = found["lines"]
    assert first == {"after": 1, "text": "import fxmem"}
    assert second["after"] == 10
    assert second["text"].startswith("model = fxmem.compile(model, budget=")
    assert "step 0" not in result.stderr


def test_the_step_is_that_of_the_trained_module(tmp_path):
    found = first_step(written(tmp_path, SCRIPT))
    assert isinstance(found.call.module, nn.Sequential)
    assert found.call.place == Place(16, "", "model")
    assert isinstance(found.optimizer, torch.optim.Adam)
    assert all(p.grad is None for p in found.call.module.parameters())
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    assert torch.autograd.backward.__module__ == "torch.autograd"


FULL = """class Full(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() and not hasattr(Full, "seen"):
            Full.seen = True
            raise RuntimeError("not enough memory")
        return x.tanh()


head ="""


def test_a_script_that_runs_out_of_memory_in_its_forward(tmp_path):
    found = first_step(written(tmp_path, SCRIPT.replace("nn.GELU()", "Full()").replace("head =", FULL)))
    assert isinstance(found.failure, RuntimeError)
    assert found.call.place.name == "model"


@pytest.mark.parametrize("text", ["print('nothing')", "raise ValueError('broken')", "import torch\ntorch.ones(1)"])
def test_a_script_without_a_backward(tmp_path, text):
    with pytest.raises(OptionError, match="runs no backward"):
        first_step(written(tmp_path, text))


def test_no_such_script():
    result = run("nowhere.py")
    assert result.exit_code == 1
    assert "no script nowhere.py" in result.output


def test_a_model_in_a_function(tmp_path):
    text = "def train(model, x):\n    y = model(x)\n    y.sum().backward()\n"
    made = edits(text, Place(2, "train", "model"), "1GiB")
    assert apply_edits(text, made).splitlines() == [
        "import fxmem", "def train(model, x):", '    model = fxmem.compile(model, budget="1GiB")', "    y = model(x)",
        "    y.sum().backward()",
    ]  # fmt: skip


def test_the_last_assignment_before_the_call_counts():
    body = '    net = f()\n    net = net.to(\n        "cpu"\n    )\n    net(x)\n'
    text = f'"""Doc."""\nfrom __future__ import annotations\n\ndef main():\n{body}'
    made = edits(text, Place(9, "main", "net"), "1GiB")
    lines = apply_edits(text, made).splitlines()
    assert lines[2] == "import fxmem"
    assert lines[9] == '    net = fxmem.compile(net, budget="1GiB")'
    compile(apply_edits(text, made), "edited", "exec")


STRANGER = """import resource

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)]
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
if LIMITED:
    resource.setrlimit(resource.RLIMIT_DATA, (used + ROOM, used + ROOM))
x = torch.randn(131072, 32)
for step in range(2):
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained", float(loss))
"""
ROOM = 850 << 20


def trained(folder, text):
    settings = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    path = folder / "limited.py"
    path.write_text(text.replace("LIMITED", "True").replace("ROOM", str(ROOM)))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=settings, check=False)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_strangers_minute(tmp_path):
    """A script of 20 lines that a memory limit ends; two lines that explain shows, added; the same script under it."""
    assert len(STRANGER.splitlines()) == 20
    before = trained(tmp_path, STRANGER)
    assert before.returncode != 0
    assert "alloc" in before.stderr
    script = written(tmp_path, STRANGER.replace("LIMITED", "False").replace("ROOM", "0"))
    result = run(script, "--json", "--budget", "420MiB")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["peak_bytes"] > ROOM
    assert len(found["lines"]) <= 3
    lines = STRANGER.splitlines()
    for line in sorted(found["lines"], key=lambda line: -line["after"]):
        lines.insert(line["after"], line["text"])
    after = trained(tmp_path, "\n".join(lines))
    assert after.returncode == 0, after.stderr[-2000:]
    assert "trained" in after.stdout
