"""What measured costs hold for, and what a device has room for."""

import time
import weakref

import torch

from fxmem.analysis import profile
from fxmem.analysis.calls import Call, TensorSpec


def test_costs_of_other_precisions_are_kept_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("FXMEM_CACHE", str(tmp_path))
    before = torch.get_float32_matmul_precision()
    files = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", precision == "medium")
        files.append(profile._cache_file("cpu"))
    torch.set_float32_matmul_precision(before)
    assert files[0] != files[1]


def test_blocks_that_the_allocator_keeps_are_room(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert profile.free_bytes("cuda:1") == 140


def _call(target):
    spec = TensorSpec((64, 64), (64, 1), torch.float32, "cpu", 0, 64 * 64 * 4)
    return Call(target, (spec,), {}, (spec,))


def test_seconds_are_those_of_the_op_not_of_what_else_runs():
    def interrupted(x):
        time.sleep(0.02)
        return x + 1

    assert profile.measure_call(_call(interrupted)).seconds < 0.01


def test_one_disturbed_run_leaves_no_trace():
    runs = []

    def disturbed_once(x):
        runs.append(1)
        deadline = time.thread_time() + (0.1 if len(runs) == 3 else 0)
        while time.thread_time() < deadline:
            pass
        return x + 1

    assert profile.measure_call(_call(disturbed_once)).seconds < 0.05


def test_timed_runs_reuse_memory_below_a_standing_output():
    """Else the heap's top goes back to the system after each run, and an op pays for new pages as it never does in a
    step."""
    standing, outputs = [], []

    def watched(x):
        standing.append(sum(ref() is not None for ref in outputs))
        output = x + 1
        outputs.append(weakref.ref(output))
        return output

    profile.measure_call(_call(watched))
    assert standing[:2] == [0, 1]
    assert set(standing[2:]) == {1}
