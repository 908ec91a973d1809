"""What gets installed: the wheel, built through the sdist, in a place that has never seen this checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON_DIRS = ("fxmem", "passes")
BUILD_FILES = ("pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.slow

PROBE = """
import importlib, importlib.util, json
from importlib import metadata

def entry_point(group, name):
    (found,) = metadata.entry_points(group=group, name=name)
    return callable(found.load())

print(json.dumps({
    "fxmem": importlib.import_module("fxmem").__file__,
    "passes": importlib.import_module("fxmem.passes").__file__,
    "generic_passes": importlib.util.find_spec("passes") is not None,
    "console": entry_point("console_scripts", "fxmem"),
    "backend": entry_point("torch_dynamo_backends", "fxmem"),
}))
"""


PLAN = """
import json, torch, fxmem
from fxmem.planners.kernel import binding
body = torch.nn.Sequential(*(layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())))
plan = fxmem.plan(lambda x: body(x).square().mean(), (torch.randn(256, 32),), 0.6, device_spec="cpu")
peaks = {"peak": plan.peak_bytes, "budget": plan.budget_bytes, "unplanned": plan.baseline_peak_bytes}
print(json.dumps({**peaks, "kernel": str(binding._library_path())}))
"""
KERNEL = "fxmem/planners/kernel/_kernel.abi3.so"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def source_files(root: Path, suffix: str) -> set[str]:
    """Names of the package's files as they must be installed, posix, relative to site-packages."""
    link = root / "fxmem" / "passes"
    own = {p.relative_to(root) for p in (root / "fxmem").rglob(f"*{suffix}") if link not in p.parents}
    passes = {"fxmem" / p.relative_to(root) for p in (root / "passes").rglob(f"*{suffix}")}
    return {p.as_posix() for p in own | passes}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources without anything compiled."""
    root = tmp_path_factory.mktemp("checkout")
    for name in PYTHON_DIRS:
        ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=ignore)
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, root)
    return root


@pytest.fixture(scope="module")
def dist_dir(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist, and the wheel built from it."""
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, checkout, cwd=target)
    return target


@pytest.fixture(scope="module")
def wheel(dist_dir: Path) -> Path:
    (path,) = dist_dir.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    return target


def test_passes_is_a_relative_symlink_in_the_checkout() -> None:
    link = ROOT / "fxmem" / "passes"
    assert link.is_symlink()
    assert link.readlink() == Path("../passes")


def test_sdist_holds_real_files_under_fxmem_passes(checkout: Path, dist_dir: Path) -> None:
    (path,) = dist_dir.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert source_files(checkout, ".py") <= members.keys()
    assert source_files(checkout, ".c") | source_files(checkout, ".h") <= members.keys()


def test_wheel_holds_every_module_and_data_file_and_nothing_generic(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert source_files(checkout, ".py") | source_files(checkout, ".json") | {"fxmem/py.typed"} <= names
    assert {"fxmem/report/page.css", "fxmem/report/page.js"} <= names
    assert not [name for name in names if name.endswith((".c", ".h"))]  # they would be compiled where they seem newer
    top = {name.partition("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"fxmem"}


def test_installed_package_imports_from_a_fresh_place(site: Path, tmp_path: Path) -> None:
    found = json.loads(run(sys.executable, "-c", PROBE, cwd=tmp_path, PYTHONPATH=str(site)).splitlines()[-1])
    for name in ("fxmem", "passes"):
        assert Path(found[name]).is_relative_to(site)
    assert not (site / "fxmem" / "passes").is_symlink()
    assert not found["generic_passes"]
    assert found["console"]
    assert found["backend"]


def test_one_wheel_serves_every_python(wheel: Path) -> None:
    assert re.search(r"-cp311-abi3-linux_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == [KERNEL]
    undefined = run("nm", "-D", "--undefined-only", wheel_kernel(wheel), cwd=wheel.parent)
    assert not re.search(r"\bPy|_Py", undefined)


def wheel_kernel(wheel: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(KERNEL, wheel.parent / "extracted"))


def test_planning_needs_no_compiler(site: Path, tmp_path: Path) -> None:
    settings = {"PYTHONPATH": str(site), "PATH": "", "CC": "/nowhere/cc", "FXMEM_CACHE": str(tmp_path)}
    found = json.loads(run(sys.executable, "-W", "ignore", "-c", PLAN, cwd=tmp_path, **settings).splitlines()[-1])
    assert Path(found["kernel"]) == site / KERNEL
    assert found["peak"] <= found["budget"] < found["unplanned"]
