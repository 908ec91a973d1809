"""What every op of a joint graph costs: measured on this machine, or estimated for a `device_spec`."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import sympy
import torch
from torch import fx

from fxmem.analysis.calls import Call, call_of
from fxmem.analysis.devices import DeviceSpec, device_spec, round_up
from fxmem.analysis.profile import Measured, profile_calls
from fxmem.analysis.roofline import estimate_s
from fxmem.errors import VerifyError
from fxmem.ir import sizes
from fxmem.ir.program import Op, Program

PROFILE_LIMIT_S = 30.0
_CUDA_ROUNDING_BYTES = 512
_STAND_INS = {"cuda": "h100-80g", "cpu": "cpu"}  # whose roofline serves where nothing can be measured


@dataclass(frozen=True)
class Costs:
    """Per op of a program: seconds and workspace bytes. Per storage: the bytes its allocation really takes. `notes`:
    op name -> why its cost is an estimate although it was to be measured."""

    seconds: tuple[float, ...]
    workspace_bytes: tuple[int, ...]
    storage_bytes: tuple[int | sympy.Expr, ...]
    notes: Mapping[str, str]

    def apply(self, program: Program) -> Program:
        """`program` with these costs and allocation sizes."""
        storages = tuple(
            replace(s, nbytes=nbytes) for s, nbytes in zip(program.storages, self.storage_bytes, strict=True)
        )
        return replace(program, storages=storages).with_costs(list(self.seconds), list(self.workspace_bytes))


def annotate(
    program: Program,
    graph_module: fx.GraphModule,
    device_spec: str | Path | DeviceSpec | None = None,
    *,
    limit_s: float = PROFILE_LIMIT_S,
) -> Program:
    """`program` with the cost of each op and the real size of each allocation; see `find_costs`."""
    return find_costs(program, graph_module, device_spec, limit_s=limit_s).apply(program)


def find_costs(
    program: Program,
    graph_module: fx.GraphModule,
    spec: str | Path | DeviceSpec | None = None,
    *,
    limit_s: float = PROFILE_LIMIT_S,
) -> Costs:
    """Costs of `program`'s ops, which are `graph_module`'s nodes in order, at the hints of its size symbols.

    With a `spec` every op is estimated for that device. Without one each distinct op is measured on its own device,
    for at most about `limit_s` seconds in all; what can't be measured is estimated, in proportion to what was.
    Inputs and folded ops cost nothing. Raises OptionError for an unknown spec, VerifyError if graph and program differ.
    """
    chosen = device_spec(spec) if spec is not None else None
    calls, notes = _calls(program, graph_module)
    if chosen is not None:
        seconds = {i: estimate_s(call, chosen) for i, call in calls.items()}
        storage_bytes = _rounded(program, dict.fromkeys(range(len(program.storages)), chosen.rounding_bytes))
        return _costs(program, seconds, {}, storage_bytes, notes)
    alone = [call for i, call in calls.items() if not program.ops[i].is_collective]  # the others would wait, or answer
    measured, skipped = profile_calls(_by_importance(alone), limit_s)
    seconds = _seconds(calls, measured)
    notes |= {op.name: "not measured: other ranks take part in it" for op in program.ops if op.is_collective}
    notes |= {program.ops[i].name: skipped[call.key] for i, call in calls.items() if call.key in skipped}
    found = {i: measured[call.key] for i, call in calls.items() if call.key in measured}
    rounding = {s.id: _CUDA_ROUNDING_BYTES for s in program.storages if s.device.startswith("cuda")}
    storage_bytes = _as_allocated(program, found, _rounded(program, rounding))
    return _costs(program, seconds, {i: m.workspace_bytes for i, m in found.items()}, storage_bytes, notes)


def _calls(program: Program, graph_module: fx.GraphModule) -> tuple[dict[int, Call], dict[str, str]]:
    """Calls by op index, of the ops that cost anything; and why some have none."""
    nodes = [node for node in graph_module.graph.nodes if node.op != "output"]
    if [node.name for node in nodes] != [op.name for op in program.ops]:
        raise VerifyError(f"program {program.name} is not of this graph: their ops differ")
    calls: dict[int, Call] = {}
    notes: dict[str, str] = {}
    for node, op in zip(nodes, program.ops, strict=True):
        if op.is_input or program.is_folded(op):
            continue
        try:
            calls[op.index] = call_of(node, program.hints)
        except VerifyError as error:
            notes[op.name] = str(error)
    return calls, notes


def _by_importance(calls: Iterable[Call]) -> dict[str, Call]:
    """Distinct calls by key; those that weigh most in the step by the roofline come first."""
    calls = list(calls)
    counts = Counter(call.key for call in calls)
    distinct = {call.key: call for call in calls}
    weight = {key: counts[key] * estimate_s(call, _stand_in(call)) for key, call in distinct.items()}
    return {key: distinct[key] for key in sorted(distinct, key=lambda key: -weight[key])}


def _stand_in(call: Call) -> DeviceSpec:
    return device_spec(_STAND_INS.get(torch.device(call.device).type, "cpu"))


def _seconds(calls: Mapping[int, Call], measured: Mapping[str, Measured]) -> dict[int, float]:
    """Measured seconds; elsewhere the roofline's, scaled by the median of measured to estimated on that device."""
    ratios: dict[str, list[float]] = {}
    distinct = {call.key: call for call in calls.values() if call.key in measured}
    for key, call in distinct.items():
        ratios.setdefault(call.device, []).append(measured[key].seconds / estimate_s(call, _stand_in(call)))
    scale = {device: statistics.median(values) for device, values in ratios.items()}
    return {
        i: measured[call.key].seconds
        if call.key in measured
        else estimate_s(call, _stand_in(call)) * scale.get(call.device, 1.0)
        for i, call in calls.items()
    }


def _rounded(program: Program, multiples: Mapping[int, int]) -> list[int | sympy.Expr]:
    return [round_up(s.nbytes, multiples.get(s.id, 1)) for s in program.storages]


def _as_allocated(
    program: Program, measured: Mapping[int, Measured], nbytes: list[int | sympy.Expr]
) -> list[int | sympy.Expr]:
    """`nbytes` corrected where an op's real outputs took other bytes than its metadata says.
    """
    corrected = list(nbytes)
    values = [sizes.evaluate(n, program.hints) for n in nbytes]
    for index, result in measured.items():
        op = program.ops[index]
        if len(op.storages) != len(result.storage_bytes):
            continue
        for storage, real in zip(op.storages, result.storage_bytes, strict=True):
            if real >= 0 and real != values[storage] and program.producer[storage] == index:
                corrected[storage] = _real_size(program, op, nbytes, values, storage, real)
    return corrected


def _real_size(
    program: Program, op: Op, nbytes: list[int | sympy.Expr], values: list[int], storage: int, real: int
) -> int | sympy.Expr:
    """`real` bytes as an expression: the size of something the op reads, if that is it.

    Else the difference grows in proportion to the largest symbolic size the op touches.
    """
    for read in program.reads(op):
        if values[read] == real and not isinstance(nbytes[read], int):
            return nbytes[read]
    by = program.scale_storage(op, values)
    difference = real - values[storage]
    return nbytes[storage] + (difference if by is None else sympy.ceiling(difference * nbytes[by] / values[by]))


def _costs(
    program: Program,
    seconds: Mapping[int, float],
    workspace_bytes: Mapping[int, int],
    storage_bytes: list[int | sympy.Expr],
    notes: Mapping[str, str],
) -> Costs:
    num_ops = len(program.ops)
    return Costs(
        seconds=tuple(seconds.get(i, 0.0) for i in range(num_ops)),
        workspace_bytes=tuple(workspace_bytes.get(i, 0) for i in range(num_ops)),
        storage_bytes=tuple(storage_bytes),
        notes=dict(notes),
    )
