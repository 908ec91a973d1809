"""Settings and fixtures that every test shares."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: tests build models from configs and fetch nothing
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it: one cache a run, and never the user's
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fxmem-test-cache-")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import pytest
import torch
from hypothesis import HealthCheck, settings

from fxmem import compat

GOLDEN_DIR = Path(__file__).parent / "golden"

torch.set_num_threads(1)

# No deadlines or speed checks in any profile: a busy machine must not fail a test.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("thorough", parent=settings.get_profile("dev"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden texts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _no_profiler_left_behind() -> Iterator[None]:
    """A session that a test leaves open would change what every later test of the same process measures."""
    yield
    if compat.profiler_is_active():
        gc.collect()  # a step ends with its outputs
    left = compat.profiler_is_active()
    if left:
        torch.autograd._disable_profiler()
    assert not left, "the test left a profiler running"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return `check(name, text)`: tests/golden/<name>.txt must hold `text`; `--update-golden` writes it."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN_DIR / f"{name}.txt"
        text = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists():
            pytest.fail(f"{path} does not exist; create it with --update-golden")
        else:
            assert text == path.read_text(encoding="utf-8"), f"{path} differs; look at it, then --update-golden"

    return check
