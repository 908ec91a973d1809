"""Synthetic chains with V100-like rates: GPT-, VGG- and AmoebaNet-like, for tests and benchmarks.

Rates: 15.7 TFLOP/s fp32 at 60 % in matrix products, 900 GB/s memory; adapted sizes only, no measurement. Each block's
recompute options follow how such a block is built: cheap element-wise outputs first, then whole branches, then
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxmem.pipelining.chain import Block, Chain, Link, Option, lower_hull

FLOPS_PER_S = 15.7e12 * 0.6
BYTES_PER_S = 900e9 * 0.7
LAUNCH_S = 60e-6
V100_LINK = Link(latency_s=20e-6, bytes_per_s=10e9)
"""Ethernet-class interconnect between the nodes of a pipeline."""
STATIC_PER_PARAMETER = 16
"""fp32 weight, gradient and two Adam moments."""


def _block(
    name: str,
    flops: float,
    moved_bytes: float,
    parameters: float,
    output_bytes: float,
    pieces: Sequence[tuple[float, float]],
    transient_bytes: float,
    weight_share: float = 0.5,
) -> Block:
    """A block of `flops` forward that touches `moved_bytes`; `pieces` are (saved bytes, forward fraction to recompute
    them).
    """
    forward_s = LAUNCH_S + flops / FLOPS_PER_S + moved_bytes / BYTES_PER_S
    backward_s = 2 * forward_s
    saved, extra = sum(nbytes for nbytes, _ in pieces), 0.0
    options = [Option(0.0, saved)]
    for nbytes, fraction in pieces:
        saved, extra = max(saved - nbytes, 0.0), extra + fraction * forward_s
        if nbytes > 0:
            options.append(Option(extra, saved))
    kept_for_weights = sum(nbytes for nbytes, _ in pieces) * 0.5 + output_bytes if flops else 0.0
    return Block(
        name=name,
        forward_s=forward_s,
        backward_input_s=backward_s * (1 - weight_share),
        backward_weight_s=backward_s * weight_share,
        static_bytes=parameters * STATIC_PER_PARAMETER,
        num_parameters=round(parameters),
        output_bytes=output_bytes,
        options=lower_hull(options),
        forward_transient_bytes=transient_bytes,
        backward_transient_bytes=transient_bytes,
        weight_saved_bytes=kept_for_weights,
        overhead_s=LAUNCH_S,
    )


def gpt_like(
    num_layers: int = 24, width: int = 1024, sequence: int = 1024, batch: int = 4, vocab: int = 50257
) -> Chain:
    """An embedding, `num_layers` attention and MLP half-blocks each, a head with its loss; fp32, `batch` per
    microbatch.
    """
    tokens = float(batch * sequence)
    act = 4 * tokens * width
    scores = 4 * tokens * sequence * (width // 64)
    blocks = [_block("embedding", 0, 2 * act, vocab * width + sequence * width, act, [(0, 0)], act, weight_share=0.95)]
    for layer in range(num_layers):
        attention_flops = 2 * tokens * (4 * width**2 + 2 * sequence * width)
        attention = [(act + 2 * scores, 0.25), (act, 0.05), (3 * act, 0.7)]
        blocks.append(
            _block(f"attention{layer}", attention_flops, 8 * act + 4 * scores, 4 * width**2, act, attention, 2 * scores)
        )
        mlp = [(4 * act, 0.04), (act, 0.03), (4 * act, 0.93)]
        blocks.append(_block(f"mlp{layer}", 2 * tokens * 8 * width**2, 14 * act, 8 * width**2, act, mlp, 4 * act))
    logits = 4 * tokens * vocab
    blocks.append(
        _block("head", 2 * tokens * width * vocab, 4 * logits, width, 4.0, [(act, 0.02), (logits, 0.98)], 2 * logits)
    )
    return Chain(f"gpt-{num_layers}x{width}", tuple(blocks), 8 * tokens)


def vgg_like(width: int = 64, image: int = 224, batch: int = 16, convs: Sequence[int] = (2, 3, 4, 4, 4)) -> Chain:
    """Convolutions in five resolutions, then three dense layers that hold most parameters: activations early, weights
    late.
    """
    blocks: list[Block] = []
    channels, side = 3, image
    for group, count in enumerate(convs):
        out = width * min(2**group, 8)
        for index in range(count):
            plane = 4.0 * batch * side * side * out
            parameters = 9.0 * channels * out
            flops = 2 * batch * side * side * parameters
            blocks.append(
                _block(
                    f"conv{group}.{index}",
                    flops,
                    4 * plane,
                    parameters,
                    plane,
                    [(plane, 0.12), (plane / 4, 0.88)],
                    plane,
                )
            )
            channels = out
        side //= 2
        blocks.append(
            _block(
                f"pool{group}",
                0,
                5.0 * batch * side * side * out * 4,
                0,
                4.0 * batch * side * side * out,
                [(8.0 * batch * side * side * out, 1)],
                0,
            )
        )
    features, hidden = channels * side * side, 4096
    for index, (wide, out) in enumerate([(features, hidden), (hidden, hidden), (hidden, 1000)]):
        nbytes = 4.0 * batch * out
        blocks.append(
            _block(
                f"dense{index}",
                2.0 * batch * wide * out,
                4.0 * wide * out,
                wide * out,
                nbytes if index < 2 else 4.0,
                [(2 * nbytes, 0.9)],
                nbytes,
            )
        )
    return Chain(f"vgg-{width}", tuple(blocks), 12.0 * batch * image**2)


def amoebanet_like(num_cells: int = 18, filters: int = 192, image: int = 224, batch: int = 32) -> Chain:
    """A stem, three groups of `num_cells` // 3 normal cells with a reduction between, a classifier.

    Early cells hold large planes and few parameters, late cells the reverse; every cell saves many branch outputs.
    """
    side, channels = image // 4, filters
    plane = 4.0 * batch * side * side * channels
    stem = 2.0 * batch * side * side * channels * 27
    blocks = [_block("stem", stem, 6 * plane, 27.0 * channels, plane, [(2 * plane, 0.2), (plane, 0.8)], plane)]
    for group in range(3):
        for index in range(num_cells // 3):
            blocks.append(_cell(f"cell{group}.{index}", batch, side, channels))
        if group < 2:
            side, channels = side // 2, channels * 2
            blocks.append(_cell(f"reduction{group}", batch, side, channels))
    blocks.append(
        _block(
            "classifier",
            2.0 * batch * channels * 1000,
            4.0 * batch * side * side * channels,
            channels * 1000.0,
            4.0,
            [(8.0 * batch * 1000, 1)],
            4.0 * batch * 1000,
        )
    )
    return Chain(f"amoebanet-{num_cells}x{filters}", tuple(blocks), 12.0 * batch * image**2)


def _cell(name: str, batch: int, side: int, channels: int) -> Block:
    plane = 4.0 * batch * side * side * channels
    parameters = 14.0 * channels**2 + 60.0 * channels
    flops = 2.0 * batch * side * side * parameters
    pieces = [(6 * plane, 0.1), (6 * plane, 0.25), (4 * plane, 0.35), (2 * plane, 0.3)]
    return _block(name, flops, 40 * plane, parameters, plane, pieces, 4 * plane)


FAMILIES: dict[str, Callable[[int], Chain]] = {
    "gpt": lambda size: gpt_like(num_layers=size),
    "vgg": lambda size: vgg_like(width=4 * size),
    "amoebanet": lambda size: amoebanet_like(num_cells=18, filters=8 * size),
}
"""Name to a chain of a given size; the parameter count grows with `size`: layers of GPT, width of the CNNs."""
