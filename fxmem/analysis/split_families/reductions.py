"""Reductions and scans: along the dims that stay; sums along all."""

from __future__ import annotations

from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Output, Rule, Ways
from fxmem.analysis.split_families.combinators import mapped
from fxmem.analysis.split_families.views import other_dims

aten = torch.ops.aten


def reduced(call: Call) -> Ways:
    """Along the dims that stay."""
    return mapped(call, _kept_dims(call))


def summed(call: Call) -> Ways:
    """Along all dims: those that are summed over give sums."""
    kept = _kept_dims(call)
    return mapped(call, {d: kept.get(d, "sum") for d in range(call.ndim("self"))})


def _kept_dims(call: Call) -> dict[int, Output]:
    """dim of the input -> dim of the result, for those that are not reduced."""
    ndim = call.ndim("self")
    gone = set(call.dims())
    kept = [d for d in range(ndim) if d not in gone]
    return {d: d if call.arguments.get("keepdim") else i for i, d in enumerate(kept)}


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), summed),
    **dict.fromkeys((aten.mean.dim, aten.prod.dim_int, aten.amax, aten.amin, aten.aminmax), reduced),
    **dict.fromkeys((aten.var.correction, aten.std.correction, aten.var_mean.correction), reduced),
    **dict.fromkeys((aten.std_mean.correction, aten.logsumexp), reduced),
    **dict.fromkeys((aten.linalg_vector_norm, aten.norm.ScalarOpt_dim), reduced),
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.median.dim, aten.mode, aten.kthvalue), reduced),
    **dict.fromkeys((aten.argmax, aten.argmin, aten.count_nonzero.dim_IntList), reduced),
    **dict.fromkeys((aten.any.dim, aten.any.dims, aten.all.dim, aten.all.dims), reduced),
    **dict.fromkeys((aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin), other_dims),
    **dict.fromkeys((aten.sort.default, aten.sort.stable, aten.topk), other_dims),
    **dict.fromkeys((aten._softmax, aten._log_softmax, aten._safe_softmax), other_dims),
    **dict.fromkeys((aten._softmax_backward_data, aten._log_softmax_backward_data), other_dims),
}
