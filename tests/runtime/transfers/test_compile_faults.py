"""`fxmem.compile(..., tiers=...)` when things go wrong: a whole step fails, the next works, nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch

import fxmem
from fxmem.runtime.transfers import arena, ops
from fxmem.runtime.transfers.disk_file import PREFIX, shared_file
from fxmem.schedule import Machine
from fxmem.schedule.simulate import Link
from tests.models import blocks, gradients

FAST = Link(1e12, 1e12)


class Calls:
    """`os`, but the calls named in `errors` fail: with an OSError of that number, or (0) by moving nothing."""

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        code = self.errors.get(name)
        if code is None:
            return getattr(os, name)
        if code == 0:
            return lambda *args: 0

        def fail(*args: Any) -> Any:
            raise OSError(code, os.strerror(code))

        return fail


@pytest.fixture
def fast_links(monkeypatch):
    """Links so fast that plans offload."""
    monkeypatch.setattr("fxmem.step.graph_plan.machine", lambda tiers, *_: Machine(dict.fromkeys(tiers, FAST)))


def compiled(tier, folder, device="cpu"):
    """(module, args, step); nothing is captured yet."""
    module, args = blocks(batch=1024)
    module, args = module.to(device), tuple(x.to(device) for x in args)
    step = fxmem.compile(module, budget=0.7, tiers=tier, offload_dir=folder, solve_s=0.5)
    return module, args, step


def expected_gradients(module, args):
    module(*args).backward()
    return gradients(module)


def is_same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def verify_empty(folder):
    """Once no step is left, neither is a file."""
    torch.compiler.reset()
    for _ in range(3):  # what dies in one collection may free cycles for the next
        gc.collect()
    assert list(folder.iterdir()) == []


FAULTS = [
    ("posix_fallocate", errno.ENOSPC, "free space there"),
    ("posix_fallocate", errno.EDQUOT, "quota"),
    ("open", errno.EACCES, "make the folder writable"),
    ("open", errno.EROFS, "read-only"),
    ("pwrite", errno.EIO, "another offload_dir"),
    ("pwrite", 0, "short write"),
    ("preadv", 0, "short read"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("fast_links")
def test_disk_faults_fail_one_step(tmp_path):
    check_disk_faults(tmp_path, "cpu")


def check_disk_faults(tmp_path, device):
    """Every fault before the file exists, then those that can come with it there; a good step after each round."""
    module, args, step = compiled("disk", tmp_path, device)
    expected = expected_gradients(module, args)
    calls = shared_file(tmp_path)._calls = Calls()
    for warm in (False, True):
        for name, code, remedy in FAULTS:
            if warm and name in ("posix_fallocate", "open"):
                continue  # the file is there already
            calls.errors = {name: code}
            with pytest.raises(fxmem.OffloadError, match=remedy):
                step(*args).backward()
            assert all(p.grad is None for p in module.parameters()), name
            if name in ("posix_fallocate", "open"):
                assert list(tmp_path.iterdir()) == []
            calls.errors = {}
        step(*args).backward()
        assert is_same(gradients(module), expected)
    assert step.plan.simulation.bytes_moved > 0
    del step
    verify_empty(tmp_path)


@pytest.mark.usefixtures("fast_links")
def test_host_memory_refused(tmp_path, monkeypatch):
    module, args, step = compiled("host", tmp_path)
    expected = expected_gradients(module, args)

    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(arena.mmap, "mmap", refuse)
        for _ in range(2):
            with pytest.raises(fxmem.OffloadError, match=r"refused .*free host memory"):
                step(*args)
    for _ in range(2):
        step(*args).backward()
        assert is_same(gradients(module), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_links")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_levels_are_flat_over_200_steps(tier, tmp_path):
    check_levels(tier, tmp_path, "cpu")


def check_levels(tier, tmp_path, device):
    """Some backwards are skipped, some raise; what the device, the host and the disk hold does not grow."""
    module, args, step = compiled(tier, tmp_path, device)
    expected = expected_gradients(module, args)
    before = set(ops._ENGINES)

    def fail(_):
        raise ZeroDivisionError

    def levels():
        gc.collect()
        (engine,) = (engine for key, (engine, _) in ops._ENGINES.items() if key not in before)
        found = engine.levels()
        peak_bytes = fxmem.measure(lambda: step(*args).backward()).peak_bytes
        module.zero_grad()
        return found, peak_bytes, sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    for number in range(200):
        loss = step(*args)
        if number % 5 == 1:
            loss.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        elif number % 5 != 2:
            loss.backward()
        del loss
        found = gradients(module)
        assert is_same(found, expected) or (number % 5 in (1, 2) and not found)
        del found
        if number == 9:
            early = levels()
    late = levels()
    assert late[:2] == early[:2]
    assert late[2] <= early[2]
    assert late[0].num_steps == late[0].pending_device_bytes == 0
    assert late[0].host_bytes + late[0].disk_bytes > 0
    assert late[1] <= step.plan.budget_bytes


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
import fxmem, fxmem.step.graph_plan
from tests.runtime.transfers.test_compile_faults import FAST, Machine, compiled
fxmem.step.graph_plan.machine = lambda tiers, *_: Machine(dict.fromkeys(tiers, FAST))
module, args, step = compiled("disk", {folder!r})
loss = step(*args)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("fast_links")
def test_a_killed_step_leaves_a_file_that_the_next_one_removes(tmp_path, request):
    code = KILLED.format(root=str(request.config.rootpath), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(PREFIX)
    module, args, step = compiled("disk", tmp_path)
    step(*args).backward()
    assert not leftover.exists()
    assert is_same(gradients(module), expected_gradients(module, args))
    del step
    verify_empty(tmp_path)
