"""What measured costs hold for, and what a device has room for."""

import torch

from fxmem.analysis import cache, profile


def test_costs_of_other_precisions_are_kept_apart(monkeypatch, tmp_path):
    monkeypatch.setenv("FXMEM_CACHE", str(tmp_path))
    before = torch.get_float32_matmul_precision()
    files = []
    for precision in ("highest", "medium"):
        torch.set_float32_matmul_precision(precision)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", precision == "medium")
        files.append(cache.cache_file("ops", profile._precision()))
    torch.set_float32_matmul_precision(before)
    assert files[0] != files[1]


def test_blocks_that_the_allocator_keeps_are_room(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 20)
    assert profile.free_bytes("cuda:1") == 140
