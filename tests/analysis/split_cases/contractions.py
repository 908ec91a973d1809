"""Products and embeddings."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.analysis.split_cases.draw import Args, Case, Draw

aten = torch.ops.aten


def _mm(d: Draw) -> Args:
    m, k, n = d.sizes(3)
    square = d.floats(m, m)
    return d.choose((d.floats(m, k), d.floats(k, n)), (square, square))


def _addmm(d: Draw) -> Args:
    m, k, n = d.sizes(3)
    return d.floats(*d.broadcast((m, n))), d.floats(m, k), d.floats(k, n), {"beta": 0.5, "alpha": 2}


def _bmm(d: Draw) -> Args:
    b, m, k, n = d.sizes(4)
    return d.floats(b, m, k), d.floats(b, k, n)


def _baddbmm(d: Draw) -> Args:
    b, m, k, n = d.sizes(4)
    return d.floats(*d.broadcast((b, m, n))), d.floats(b, m, k), d.floats(b, k, n)


def _mv(d: Draw) -> Args:
    m, k = d.sizes(2)
    return d.floats(m, k), d.floats(k)


def _addmv(d: Draw) -> Args:
    return d.floats(*d.broadcast((m := d.size(),))), d.floats(m, k := d.size()), d.floats(k)


def _dot(d: Draw) -> Args:
    n = d.size()
    return d.floats(n), d.floats(n)


def _embedding(d: Draw) -> Args:
    rows, width = d.sizes(2)
    return d.floats(rows, width), d.ints(rows, *d.shape(0, 3))


def _embedding_backward(d: Draw) -> Args:
    rows, width = d.sizes(2)
    indices = d.ints(rows, *d.shape(0, 3))
    return d.floats(*indices.shape, width), indices, rows, d.choose(-1, 0), d.choose(False, False, True)


def _attention(d: Draw) -> Args:
    batch, heads, queries, width = d.sizes(4, most=3)
    is_causal = d.flag()
    keys = queries if is_causal else d.size()
    query, key, value = (d.rows(batch, heads, n, width) for n in (queries, keys, keys))
    full = (batch, heads, queries, keys)
    masks = [None, *(shape for shape in itertools.product(*((n, 1) for n in full))), full[2:]]
    shape = None if is_causal else d.choose(*masks)
    options = {} if shape is None else {"attn_mask": d.floats(*shape)}
    return query, key, value, 0.0, is_causal, options


def _attention_backward(d: Draw) -> Args:
    query, key, value, dropout, is_causal, options = _attention(d)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, is_causal, **options)
    return d.rows(*out.shape), query, key, value, out, lse, dropout, is_causal, options


CASES: dict[Any, Case] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.addmv.default: _addmv,
    aten.dot.default: _dot,
    aten.embedding: _embedding,
    aten.embedding_dense_backward: _embedding_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
