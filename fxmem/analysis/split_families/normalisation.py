"""Norms: along the dims they don't normalise over. Gradients of weights and biases are sums."""

from __future__ import annotations

from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Rule, Ways, open_dims
from fxmem.analysis.split_families.combinators import labelled, letters

aten = torch.ops.aten


def layer_norm(call: Call) -> Ways:
    rows = _rows(call)
    return labelled(call, {"input": rows}, [rows] * len(call.results))


def layer_norm_backward(call: Call) -> Ways:
    """Along the outermost dim only: the kernels take the statistics for contiguous without a look at their strides."""
    first = next(open_dims(call.shape_of("input")), 0)
    row = "." * first + "r" if first < len(_rows(call)) else ""
    names = [name for name in ("grad_out", "input", "mean", "rstd") if name in call.arguments]
    return labelled(call, dict.fromkeys(names, row), [row, *[""] * (len(call.results) - 1)])


def _rows(call: Call) -> str:
    return letters(call.ndim("input") - len(call["normalized_shape"]))


def group_norm(call: Call) -> Ways:
    return labelled(call, {"input": "b"}, ["b", "b", "b"], {"b": [("N", None)]})


def group_norm_backward(call: Call) -> Ways:
    inputs = dict.fromkeys(("grad_out", "input", "mean", "rstd"), "b")
    return labelled(call, inputs, ["b", "", ""], {"b": [("N", None)]})


def batch_norm(call: Call) -> Ways:
    """Along channels; with statistics that are given, along all dims (what is made of these is whole then)."""
    vectors = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), "c")
    yield from labelled(call, {"input": ".c", **vectors}, [".c", *["c"] * (len(call.results) - 1)])
    if not call.arguments.get("training", False):
        dims = _batch_dims(call)
        yield from labelled(call, {"input": dims}, [dims, *[None] * (len(call.results) - 1)])


def batch_norm_backward(call: Call) -> Ways:
    vectors = dict.fromkeys(("weight", "running_mean", "running_var", "save_mean", "save_invstd"), "c")
    yield from labelled(call, {"grad_out": ".c", "input": ".c", **vectors}, [".c", "c", "c"])
    if not call["train"]:
        dims = _batch_dims(call)
        yield from labelled(call, {"grad_out": dims, "input": dims}, [dims, "", ""])


def _batch_dims(call: Call) -> str:
    return "b.defgh"[: call.ndim("input")]


RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.native_layer_norm, aten._fused_rms_norm), layer_norm),
    **dict.fromkeys((aten.native_layer_norm_backward, aten._fused_rms_norm_backward), layer_norm_backward),
    aten.native_group_norm: group_norm,
    aten.native_group_norm_backward: group_norm_backward,
    **dict.fromkeys((aten._native_batch_norm_legit_functional, aten._native_batch_norm_legit.no_stats), batch_norm),
    aten._native_batch_norm_legit_no_training: batch_norm,
    aten.native_batch_norm_backward: batch_norm_backward,
}
