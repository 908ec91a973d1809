"""Seconds and workspace of single ops, measured on this machine's devices with invented inputs.

Inputs are made from metadata alone: floats in (0.25, 1), so that no denormal slows an op down; indices small enough for
whatever they index. Nothing here touches the caller's random number generators or autograd.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fxmem import compat
from fxmem.analysis import cache
from fxmem.analysis.calls import Call, TensorSpec, parts_of
from fxmem.units import align_up

_MEMORY_SHARE = 4  # an op may use at most this part of the free memory for its arguments and outputs: 1 / 4
_BLOCK = 1 << 16  # elements of the random pattern that fills arguments
_LONG_S = 0.05  # an op that takes this long is timed a few times only
_NUM_LONG_REPEATS = 2
_BATCH_S = 2e-4  # shorter ones are timed in batches of about this length
_NUM_REPEATS = 5


@dataclass(frozen=True)
class Measured:
    """One call on this device. `seconds`: the least of several runs. `workspace_bytes`: peak of the allocator within
    it, less its outputs. `storage_bytes`: allocated for each distinct output storage, -1 where that is an alias."""

    seconds: float
    workspace_bytes: int
    storage_bytes: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.seconds, self.workspace_bytes, list(self.storage_bytes)]

    @classmethod
    def from_json(cls, data: Any) -> Measured:
        """Inverse of `to_json`. Raises ValueError or TypeError for anything else."""
        seconds, workspace_bytes, storage_bytes = data
        return cls(float(seconds), int(workspace_bytes), tuple(int(n) for n in storage_bytes))


class CannotProfile(Exception):
    """Internal: the call is estimated instead; the message says why."""


def is_present(device: str) -> bool:
    """Can ops run on `device` here?"""
    kind = torch.device(device).type
    return kind == "cpu" or (kind == "cuda" and torch.cuda.is_available())


def device_name(device: str) -> str:
    """The hardware behind `device`, for cache keys and reports."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"


def free_bytes(device: str) -> int:
    """Memory that a new allocation could get."""
    if torch.device(device).type == "cuda":
        idle_bytes = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle_bytes
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 2**30


def profile_calls(calls: Mapping[str, Call], limit_s: float) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure `calls` (key -> call, the most important first) until `limit_s` seconds are spent.

    Returns what was measured, now or in an earlier process, and why the rest was not.
    """
    measured: dict[str, Measured] = {}
    skipped: dict[str, str] = {}
    deadline = time.perf_counter() + limit_s
    for device in {call.device: None for call in calls.values()}:
        here = {key: call for key, call in calls.items() if call.device == device}
        if not is_present(device):
            skipped |= dict.fromkeys(here, f"no device {device} here")
            continue
        path = _cache_file(device)
        known = _known(cache.load(path), here)
        missing = {key: call for key, call in here.items() if key not in known}
        found, failed = _measure_all(missing, device, deadline) if missing else ({}, {})
        if found:
            cache.update(path, {key: result.to_json() for key, result in found.items()})
        measured |= known | found
        skipped |= failed
    return measured, skipped


def _cache_file(device: str) -> Path:
    return cache.cache_file("op-costs", torch.__version__, device_name(device), torch.get_num_threads(), _precision())


def _precision() -> str:
    """The process-wide switches that change which kernel an op runs."""
    switches = {
        "deterministic": torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
    }
    return "-".join([torch.get_float32_matmul_precision(), *(name for name, is_on in switches.items() if is_on)])


def _known(entries: Mapping[str, Any], calls: Mapping[str, Call]) -> dict[str, Measured]:
    known = {}
    for key in calls:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            known[key] = Measured.from_json(entries[key])
    return known


def _measure_all(calls: Mapping[str, Call], device: str, deadline: float) -> tuple[dict[str, Measured], dict[str, str]]:
    found: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    with _undisturbed(device):
        for key, call in calls.items():
            if time.perf_counter() > deadline:
                failed[key] = "the time limit for measuring was reached"
                continue
            try:
                found[key] = measure_call(call)
            except CannotProfile as reason:
                failed[key] = str(reason)
            except Exception as error:
                failed[key] = f"it fails when run alone: {type(error).__name__}: {str(error).splitlines()[:1]}"
    return found, failed


@contextlib.contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    """No autograd, autocast or tracing mode reaches the measured ops, and no draw of theirs the caller."""
    on_cuda = torch.device(device).type == "cuda"
    with (
        torch.random.fork_rng([torch.device(device)] if on_cuda else []),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if on_cuda else contextlib.nullcontext(),
        torch.cuda.device(device) if on_cuda else contextlib.nullcontext(),  # where events are recorded
        compat.no_modes(),
    ):
        yield


def measure_call(call: Call) -> Measured:
    """Run `call` alone, of several branches each: the worst counts.

    Raises CannotProfile when it needs too much memory or may never end, and whatever the op itself raises.
    """
    if call.op_name.startswith("while_loop"):
        raise CannotProfile("how often its body runs depends on values")
    if call.op_name == "cond" and isinstance(call.args[0], TensorSpec):
        branches = [measure_call(replace(call, args=(taken, *call.args[1:]))) for taken in (True, False)]
        return max(branches, key=lambda measured: (measured.workspace_bytes, measured.seconds))
    needed = call.moved_bytes + sum(spec.beyond_bytes for spec in call.tensors)
    if needed * _MEMORY_SHARE > free_bytes(call.device):
        raise CannotProfile(f"its {needed} bytes are more than a quarter of the free memory")
    bounds = index_bounds(call)
    tensors = {spec.owner: _materialize(spec, bounds.get(spec.owner, 1)) for spec in call.tensors}
    args, kwargs = call.substitute(tensors)

    def run() -> Any:
        return call.target(*args, **kwargs)

    on_cuda = torch.device(call.device).type == "cuda"
    if on_cuda:
        run()  # libraries allocate their own workspaces once
    outputs, peak_bytes = _peak_on_cuda(run, call.device) if on_cuda else _peak_on_cpu(run)
    storage_bytes = _storage_bytes(call, outputs, tensors)
    # On the CPU one output stands above what timed runs reuse: else the heap's top goes back to the system each time.
    standing = None if on_cuda else run()
    del outputs
    seconds = _time(run, _cuda_seconds if on_cuda else _cpu_seconds)
    del standing
    own_bytes = sum(max(0, nbytes) for nbytes in storage_bytes)
    return Measured(seconds, max(0, peak_bytes - own_bytes), storage_bytes)


def _peak_on_cpu(run: Callable[[], Any]) -> tuple[Any, int]:
    outputs, deltas = compat.cpu_memory_deltas(run)
    standing = peak = 0
    for delta in deltas:
        standing += delta
        peak = max(peak, standing)
    return outputs, peak


def _peak_on_cuda(run: Callable[[], Any], device: str) -> tuple[Any, int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    outputs = run()
    torch.cuda.synchronize(device)
    return outputs, torch.cuda.max_memory_allocated(device) - before_bytes


def _storage_bytes(call: Call, outputs: Any, arguments: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
    """Allocated bytes per distinct output storage of the metadata; -1 where the real op returned an alias."""
    seen = {compat.storage_key(tensor) for tensor in arguments.values()}
    by_owner: dict[int, int] = {}
    for spec, real in zip(call.outputs, parts_of(outputs), strict=True):
        if spec is None or spec.owner in by_owner:
            continue
        if not isinstance(real, torch.Tensor):
            by_owner[spec.owner] = 0
            continue
        key = compat.storage_key(real)
        by_owner[spec.owner] = -1 if key in seen else _allocated_bytes(real)
        seen.add(key)
    return tuple(by_owner.values())


def _allocated_bytes(tensor: torch.Tensor) -> int:
    nbytes = int(compat.storage_nbytes(tensor))
    return align_up(nbytes, 512) if tensor.is_cuda else nbytes


def _time(run: Callable[[], Any], seconds_of: Callable[[Callable[[], Any], int], float]) -> float:
    """Least seconds of one run: what disturbs a run only ever lengthens it. Short ones are timed in batches."""
    first_s = seconds_of(run, 1)
    if first_s > _LONG_S:
        return min(first_s, *(seconds_of(run, 1) for _ in range(_NUM_LONG_REPEATS)))
    num_runs = max(1, min(20, round(_BATCH_S / max(first_s, 1e-7))))
    return min(seconds_of(run, num_runs) for _ in range(_NUM_REPEATS))


def _cpu_seconds(run: Callable[[], Any], num_runs: int) -> float:
    """Of the calling thread, which takes part in all that an op does: what else runs on the machine doesn't count."""
    begin = time.thread_time()
    for _ in range(num_runs):
        run()
    return (time.thread_time() - begin) / num_runs


def _cuda_seconds(run: Callable[[], Any], num_runs: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(num_runs):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / num_runs


def _materialize(spec: TensorSpec, bound: int) -> torch.Tensor:
    """A tensor of `spec`, in a storage as large as its own, with harmless values: floats in (0.25, 1), integers in
    [0, bound), any booleans."""
    num_elements = spec.num_spanned + spec.beyond_bytes // spec.dtype.itemsize
    flat = torch.empty(num_elements, dtype=spec.dtype, device=spec.device)
    if flat.numel():
        _fill(flat, bound)
    return flat.as_strided(spec.shape, spec.stride)


def _fill(flat: torch.Tensor, bound: int) -> None:
    size = min(_BLOCK, flat.numel())
    generator = torch.Generator().manual_seed(0)
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        block = torch.rand(size, generator=generator) * 0.75 + 0.25
    else:
        high = 2 if flat.dtype == torch.bool else min(bound, torch.iinfo(flat.dtype).max)
        block = torch.randint(0, max(1, high), (size,), generator=generator)
    block = block.to(device=flat.device, dtype=flat.dtype)
    whole = flat.numel() // size * size
    flat[:whole].view(-1, size).copy_(block)
    flat[whole:].copy_(block[: flat.numel() - whole])


def index_bounds(call: Call) -> dict[int, int]:
    """For each integer argument (by owner), a bound its values must stay under whatever it indexes.

    Without knowledge of the op that is the smallest extent in sight: of any tensor, or a positive integer argument.
    """
    integers = [spec.owner for spec in call.tensors if not spec.dtype.is_floating_point]
    extents = [n for spec in call.tensors for n in spec.shape if n > 0]
    extents += [a for a in call.args if isinstance(a, int) and not isinstance(a, bool) and a > 0]
    known = _BOUNDS.get(call.op_name)
    bound = known(call) if known is not None else min(extents, default=1)
    return dict.fromkeys(integers, bound)


_BOUNDS: dict[str, Callable[[Call], int]] = {
    "embedding": lambda call: int(call.args[0].shape[0]),
    "embedding_dense_backward": lambda call: int(call.args[2]),
    "gather": lambda call: int(call.args[0].shape[call.args[1]]),
    "nll_loss_forward": lambda call: int(call.args[0].shape[-1 if len(call.args[0].shape) == 1 else 1]),
    "nll_loss_backward": lambda call: int(call.args[1].shape[-1 if len(call.args[1].shape) == 1 else 1]),
    "nll_loss2d_forward": lambda call: int(call.args[0].shape[1]),
    "nll_loss2d_backward": lambda call: int(call.args[1].shape[1]),
}
