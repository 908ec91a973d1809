"""Device specifications: what a roofline and a transfer plan need to know about a machine that need not be here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from fxmem.errors import OptionError
from fxmem.schedule.actions import TIERS, Tier
from fxmem.schedule.simulate import Link, Machine
from fxmem.units import align_up

PLANNING_FACTOR = 0.85
"""Plans fill a link exactly: made for less than its nominal bandwidth, they survive a slower moment."""
_PRESETS = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of device.

    `flop_per_s`: peak FLOP/s by dtype name (dense, without sparsity; float32 without TF32, as torch's default is).
    `flop_efficiency`, `memory_efficiency`: fractions of the peaks that large kernels reach. `launch_s`: seconds any
    kernel costs at least. `rounding_bytes`: every allocation is a multiple of it. `links`: nominal, by tier.
    """

    name: str
    device: str
    memory_bytes: int
    flop_per_s: Mapping[str, float]
    flop_efficiency: float
    memory_bytes_per_s: float
    memory_efficiency: float
    launch_s: float
    rounding_bytes: int
    links: Mapping[Tier, Link]

    def machine(self, tiers: Iterable[Tier] = TIERS) -> Machine:
        """Links of those `tiers` that the device has, at the bandwidth plans are made for."""
        return Machine({tier: planning_link(self.links[tier]) for tier in tiers if tier in self.links})


def planning_link(nominal: Link) -> Link:
    """`nominal` with `PLANNING_FACTOR` of its bandwidth."""
    return Link(nominal.out_bytes_per_s * PLANNING_FACTOR, nominal.in_bytes_per_s * PLANNING_FACTOR, nominal.latency_s)


def preset_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def device_spec(spec: str | Path | DeviceSpec) -> DeviceSpec:
    """A preset by name, or the JSON file at a path. Raises OptionError, naming the presets, for anything else."""
    if isinstance(spec, DeviceSpec):
        return spec
    preset = _PRESETS / f"{spec}.json"
    path = preset if str(spec) in preset_names() else Path(spec)
    if not path.is_file():
        raise OptionError(
            f"unknown device_spec {str(spec)!r}: choose one of {', '.join(preset_names())}, or name a JSON file"
        )
    try:
        return _from_json(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"device_spec file {path} is malformed ({type(error).__name__}: {error}): "
            f"see the presets for its form ({', '.join(preset_names())})"
        ) from error


def _from_json(data: Mapping[str, Any]) -> DeviceSpec:
    spec = DeviceSpec(**{**data, "links": {tier: Link(**link) for tier, link in data.get("links", {}).items()}})
    positive = (spec.memory_bytes, spec.flop_efficiency, spec.memory_bytes_per_s, spec.memory_efficiency)
    if min(*positive, spec.rounding_bytes, *spec.flop_per_s.values()) <= 0 or spec.launch_s < 0:
        raise ValueError("figures must be positive")
    if unknown := set(spec.links) - set(TIERS):
        raise ValueError(f"unknown tiers {sorted(unknown)}; known: {', '.join(TIERS)}")
    return spec


def round_up(size: int | sympy.Expr, multiple: int) -> int | sympy.Expr:
    """The smallest multiple that holds `size` bytes; stays polynomial when every coefficient is a multiple already."""
    if isinstance(size, int):
        return align_up(size, multiple)
    terms = sympy.expand(size).as_coefficients_dict()
    if multiple == 1 or all(c.is_Integer and c % multiple == 0 and m.is_integer for m, c in terms.items()):
        return size
    return multiple * sympy.ceiling(size / multiple)
