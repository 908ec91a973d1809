"""Chains: validation, hulls, JSON, scaling to other numbers of microbatches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxmem.errors import OptionError
from fxmem.pipelining.chain import Chain, Link, Option, chain_from_curves, lower_hull
from fxmem.pipelining.synthetic import amoebanet_like, gpt_like, vgg_like
from tests.pipelining.chains import random_chain


def test_lower_hull_keeps_only_convex_trades() -> None:
    points = [Option(0, 10), Option(1, 9), Option(2, 2), Option(3, 5), Option(4, 1), Option(5, 1)]
    assert lower_hull(reversed(points)) == (Option(0, 10), Option(2, 2), Option(4, 1))


def test_json_round_trip() -> None:
    for chain in (random_chain(1, 6), gpt_like(3), vgg_like(), amoebanet_like(6)):
        assert Chain.from_json(chain.to_json()) == chain


def test_chain_from_curves_takes_any_pairs() -> None:
    fields = {
        "name": "block", "forward_s": 1.0, "backward_input_s": 1.0, "backward_weight_s": 1.0, "static_bytes": 4.0,
        "num_parameters": 1, "output_bytes": 2.0,
    }  # fmt: skip
    chain = chain_from_curves("model", [{**fields, "options": [(0.5, 3), (0, 9), (0.4, 8)]}] * 2)
    assert chain.blocks[0].options == (Option(0, 9), Option(0.5, 3))
    with pytest.raises(OptionError, match="has no options"):
        chain_from_curves("model", [fields])
    with pytest.raises(OptionError, match="recompute nothing"):
        chain_from_curves("model", [{**fields, "options": [(0.5, 3)]}])


def test_malformed_blocks_are_refused() -> None:
    block = random_chain(2, 1).blocks[0]
    for change in ({"forward_s": 0.0}, {"output_bytes": float("nan")}, {"static_bytes": -1.0}):
        with pytest.raises(OptionError, match="finite"):
            replace(block, **change)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="fewer bytes"):
        replace(block, options=(Option(0, 1), Option(1, 2)))


def test_scaling_keeps_the_batch_and_static_bytes() -> None:
    chain = replace(gpt_like(2), num_microbatches=4)
    finer = chain.scaled_to(8)
    for coarse, fine in zip(chain.blocks, finer.blocks, strict=True):
        assert fine.output_bytes * 2 == coarse.output_bytes
        assert fine.static_bytes == coarse.static_bytes
        assert coarse.forward_s / 2 < fine.forward_s < coarse.forward_s
    assert finer.scaled_to(4).blocks[1].total_s == pytest.approx(chain.blocks[1].total_s)


def test_link_seconds() -> None:
    assert Link(0.5, 4).seconds(8) == 2.5
    assert Link().seconds(1e12) == 0
