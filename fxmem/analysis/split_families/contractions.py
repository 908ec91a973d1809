"""Products of matrices, embeddings, attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxmem.analysis.split_families.call import Call, Rule, Ways
from fxmem.analysis.split_families.combinators import labelled, letters

aten = torch.ops.aten


def product(inputs: Mapping[str, str], output: str) -> Rule:
    """By the letters of its operands, as in einsum."""
    return lambda call: labelled(call, inputs, [output])


def product_plus(inputs: Mapping[str, str], output: str) -> Rule:
    """The same with `self` added to it (broadcast): not along what is contracted, or it would be added k times."""
    kept = {name: "".join(letter if letter in output else "." for letter in text) for name, text in inputs.items()}
    return lambda call: labelled(call, {**kept, "self": output[len(output) - call.ndim("self") :]}, [output])


def embedding(call: Call) -> Ways:
    ids = letters(call.ndim("indices"))
    return labelled(call, {"indices": ids, "weight": ".z"}, [f"{ids}z"])


def embedding_backward(call: Call) -> Ways:
    """Not where the gradient is scaled by how often an index occurs."""
    ids = letters(call.ndim("indices"))
    inputs = {"grad_output": f"{ids}z", "indices": ids}
    return () if call["scale_grad_by_freq"] else labelled(call, inputs, [".z"])


def attention(call: Call) -> Ways:
    """Along batch and heads; along queries where no mask depends on where they stand."""
    inputs = {"query": _rows(call), "key": "bh", "value": "bh", **_mask(call)}
    return labelled(call, inputs, [_rows(call)] * len(call.results))


def attention_backward(call: Call) -> Ways:
    rows = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), _rows(call))
    return labelled(call, {**rows, "key": "bh", "value": "bh", **_mask(call)}, [_rows(call), "bh", "bh"])


def _rows(call: Call) -> str:
    return "bh." if call["is_causal"] else "bhq"


def _mask(call: Call) -> dict[str, str]:
    text = f"{_rows(call)}."
    return {"attn_mask": text[len(text) - call.ndim("attn_mask") :]}


RULES: dict[Any, Rule] = {
    aten.mm.default: product({"self": "mk", "mat2": "kn"}, "mn"),
    aten.bmm.default: product({"self": "bmk", "mat2": "bkn"}, "bmn"),
    aten.mv.default: product({"self": "mk", "vec": "k"}, "m"),
    aten.dot.default: product({"self": "k", "tensor": "k"}, ""),
    aten.addmm.default: product_plus({"mat1": "mk", "mat2": "kn"}, "mn"),
    aten.baddbmm.default: product_plus({"batch1": "bmk", "batch2": "bkn"}, "bmn"),
    aten.addmv.default: product_plus({"mat": "mk", "vec": "k"}, "m"),
    aten.embedding: embedding,
    aten.embedding_dense_backward: embedding_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}
