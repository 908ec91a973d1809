"""Small random chains for the pipeline tests."""

from __future__ import annotations

import random

from fxmem.pipelining.chain import Block, Chain, Option, lower_hull


def random_block(rng: random.Random, name: str) -> Block:
    saved = float(rng.randint(2, 40))
    options = [Option(0.0, saved)]
    options += [Option(rng.uniform(0.1, 2.0), rng.uniform(0, saved)) for _ in range(rng.randint(0, 3))]
    return Block(
        name=name,
        forward_s=rng.uniform(0.5, 3),
        backward_input_s=rng.uniform(0.3, 3),
        backward_weight_s=rng.uniform(0.3, 3),
        static_bytes=float(rng.randint(1, 30)),
        num_parameters=rng.randint(0, 20),
        output_bytes=float(rng.randint(1, 8)),
        options=lower_hull(options),
        forward_transient_bytes=float(rng.randint(0, 10)),
        backward_transient_bytes=float(rng.randint(0, 10)),
        weight_saved_bytes=float(rng.randint(0, 5)),
    )


def random_chain(seed: int, length: int) -> Chain:
    rng = random.Random(seed)
    return Chain(f"random-{seed}", tuple(random_block(rng, str(number)) for number in range(length)), 2.0)
