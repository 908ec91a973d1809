"""A training step as a chain of blocks, and the devices it is cut over: what every pipeline planner reads.

Nothing here knows torch. A :class:`Block` is the smallest piece that a cut may separate; its numbers are those of one
microbatch, except `static_bytes` and `num_parameters`. JSON in and out, so planners and benchmarks run without models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fxmem.errors import OptionError

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block's backward: keep `saved_bytes`, pay `extra_s` seconds of recomputation."""

    extra_s: float
    saved_bytes: float


@dataclass(frozen=True, slots=True)
class Block:
    """Costs of one block for one microbatch (seconds, bytes).

    `options[0]` recomputes nothing; the rest form the lower convex hull of (extra seconds, saved bytes). Saved bytes
    exclude the block's own output, which is counted as `output_bytes`. `static_bytes` stay for the whole step: weights,
    gradients, optimizer state, buffers. The transients stand on top of what is saved while the block runs.
    `weight_saved_bytes` is what the weight gradient still needs once the input gradient is done (dI/dW split only).
    """

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    static_bytes: float
    num_parameters: int
    output_bytes: float
    options: tuple[Option, ...]
    forward_transient_bytes: float = 0.0
    backward_transient_bytes: float = 0.0
    weight_saved_bytes: float = 0.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        numbers = [value for value in asdict(self).values() if isinstance(value, (int, float))]
        if not self.options or self.options[0].extra_s != 0:
            raise OptionError(f"block {self.name!r}: the first option must recompute nothing (extra_s = 0)")
        if self.forward_s <= 0 or any(not 0 <= value < float("inf") for value in numbers):
            raise OptionError(f"block {self.name!r}: costs must be finite and non-negative, forward_s positive: {self}")
        for before, after in zip(self.options, self.options[1:], strict=False):
            if after.extra_s <= before.extra_s or after.saved_bytes >= before.saved_bytes:
                raise OptionError(
                    f"block {self.name!r}: options must trade more seconds for fewer bytes: {self.options}"
                )

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward with nothing recomputed."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True)
class Chain:
    """Blocks in execution order; `input_bytes` of one microbatch enter the first block and get no gradient."""

    name: str
    blocks: tuple[Block, ...]
    input_bytes: float = 0.0
    num_microbatches: int = field(default=1)
    """The number of microbatches the costs were taken at; `scaled_to` changes it at a constant batch."""

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def num_parameters(self) -> int:
        return sum(block.num_parameters for block in self.blocks)

    @cached_property
    def columns(self) -> Mapping[str, FloatArray]:
        """Each numeric field of the blocks as an array of shape [L]; `saved` is that of `options[0]`."""
        names = [name for name, value in asdict(self.blocks[0]).items() if isinstance(value, (int, float))]
        table = {name: np.array([getattr(block, name) for block in self.blocks], dtype=float) for name in names}
        table["saved_bytes"] = np.array([block.options[0].saved_bytes for block in self.blocks], dtype=float)
        table["total_s"] = np.array([block.total_s for block in self.blocks])
        return table

    def scaled_to(self, num_microbatches: int) -> Chain:
        """The same batch in `num_microbatches` parts: seconds beyond `overhead_s` and activation bytes scale, static
        bytes don't.
        """
        factor = self.num_microbatches / num_microbatches
        blocks = tuple(_scale_block(block, factor) for block in self.blocks)
        return replace(self, blocks=blocks, input_bytes=self.input_bytes * factor, num_microbatches=num_microbatches)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Chain:
        data = json.loads(text)
        blocks = [
            Block(**{**block, "options": tuple(Option(**option) for option in block["options"])})
            for block in data["blocks"]
        ]
        return Chain(data["name"], tuple(blocks), data["input_bytes"], data["num_microbatches"])


def _scale_block(block: Block, factor: float) -> Block:
    def seconds(value: float, calls: float = 1.0) -> float:
        fixed = min(value, calls * block.overhead_s)
        return fixed + (value - fixed) * factor

    return replace(
        block,
        forward_s=seconds(block.forward_s),
        backward_input_s=seconds(block.backward_input_s),
        backward_weight_s=seconds(block.backward_weight_s),
        output_bytes=block.output_bytes * factor,
        options=tuple(Option(o.extra_s * factor, o.saved_bytes * factor) for o in block.options),
        forward_transient_bytes=block.forward_transient_bytes * factor,
        backward_transient_bytes=block.backward_transient_bytes * factor,
        weight_saved_bytes=block.weight_saved_bytes * factor,
    )


def lower_hull(options: Iterable[Option]) -> tuple[Option, ...]:
    """The lower convex hull of (extra seconds, saved bytes), cheapest first; dominated options drop out."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.extra_s, o.saved_bytes)):
        if hull and option.saved_bytes >= hull[-1].saved_bytes:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return tuple(hull)


def _slope(before: Option, after: Option) -> float:
    """Bytes per second gained (negative: bytes fall)."""
    return (after.saved_bytes - before.saved_bytes) / (after.extra_s - before.extra_s)


def chain_from_curves(
    name: str, blocks: Sequence[Mapping[str, object]], *, input_bytes: float = 0.0, num_microbatches: int = 1
) -> Chain:
    """A chain from measured blocks: each mapping holds :class:`Block`'s fields, with `options` as any (seconds, bytes)
    pairs.

    The pairs may come in any order and may be dominated; one of them must cost 0 s. Raises OptionError on a malformed
    block.
    """
    built = []
    for number, fields in enumerate(blocks):
        pairs = fields.get("options")
        if not isinstance(pairs, Iterable):
            raise OptionError(f"block {number} of {name!r} has no options: expected (extra seconds, saved bytes) pairs")
        options = lower_hull(Option(float(seconds), float(nbytes)) for seconds, nbytes in pairs)
        built.append(Block(**{**fields, "options": options}))  # type: ignore[arg-type]
    return Chain(name, tuple(built), input_bytes, num_microbatches)


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link: one transfer at a time, `latency_s` plus bytes over `bytes_per_s`."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """`num_devices` devices of `memory_bytes` each; `links` overrides `link` for single (source, destination) pairs."""

    num_devices: int
    memory_bytes: float
    link: Link = Link()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.memory_bytes <= 0:
            raise OptionError(
                f"a cluster needs a device and some memory, not {self.num_devices} of {self.memory_bytes} bytes"
            )

    def between(self, source: int, destination: int) -> Link:
        return self.links.get((source, destination), self.link)
