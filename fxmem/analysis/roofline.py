"""Seconds of an op on a device that need not be here: the larger of arithmetic time and memory time, plus its launch.

Williams, Waterman, Patterson: Roofline, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import flop_counter

from fxmem.analysis.calls import Call
from fxmem.analysis.devices import DeviceSpec

_READS_FEW_ROWS = frozenset({"embedding", "gather", "index", "index_select"})  # of their first tensor argument
_ATTENTION = "_scaled_dot_product_flash_attention"  # its formula takes the leading arguments that all variants share
_FLOPS: dict[str, int] = {}  # of calls, by key: parts of a split op are alike
_MOST_KNOWN = 1 << 16


def estimate_s(call: Call, spec: DeviceSpec) -> float:
    """Seconds of `call` on `spec`."""
    arithmetic_s = flops(call) / (peak_flop_per_s(call, spec) * spec.flop_efficiency)
    memory_s = moved_bytes(call) / (spec.memory_bytes_per_s * spec.memory_efficiency)
    return spec.launch_s + max(arithmetic_s, memory_s)


def moved_bytes(call: Call) -> int:
    """Bytes read and written if every tensor crosses the memory bus once."""
    if call.op_name in _READS_FEW_ROWS and call.tensors:
        written = sum(spec.nbytes for spec in call.output_tensors)
        return 2 * written + sum(spec.nbytes for spec in call.tensors[1:])
    return call.moved_bytes


def flops(call: Call) -> int:
    """Multiplications and additions as torch's FLOP counter has them; 0 for what it does not count."""
    if call.key not in _FLOPS:
        if len(_FLOPS) == _MOST_KNOWN:
            _FLOPS.clear()
        _FLOPS[call.key] = _flops(call)
    return _FLOPS[call.key]


def _flops(call: Call) -> int:
    formula = _formula(call)
    if formula is None:
        return 0
    args, kwargs = call.substitute({spec.owner: spec.meta() for spec in call.tensors})
    outputs = tuple(spec.meta() if spec is not None else None for spec in call.outputs)
    return int(formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else outputs))


def _formula(call: Call) -> Any:
    registry = flop_counter.flop_registry
    packet = getattr(torch.ops.aten, call.op_name.removesuffix("_"), call.packet)  # in place or not, the same work
    if packet in registry:
        return registry[packet]
    if not call.op_name.startswith("_scaled_dot_product"):
        return None
    is_backward = call.op_name.endswith("_backward")
    formula = registry[getattr(torch.ops.aten, _ATTENTION + "_backward" * is_backward)]
    num_leading = 4 if is_backward else 3  # (the output's gradient,) query, key, value
    return lambda *args, out_val, **_: formula(*args[:num_leading], out_val=out_val)


def peak_flop_per_s(call: Call, spec: DeviceSpec) -> float:
    """Peak for the dtype that `call` computes in (that of its first floating-point tensor)."""
    floats = (t.dtype for t in (*call.tensors, *call.output_tensors) if t.dtype.is_floating_point)
    name = str(next(floats, torch.float32)).removeprefix("torch.")
    return spec.flop_per_s.get(name, spec.flop_per_s["float32"])
