"""Device specifications and the roofline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fxmem.analysis.calls import Call, TensorSpec
from fxmem.analysis.devices import PLANNING_FACTOR, device_spec, preset_names, round_up
from fxmem.analysis.roofline import estimate_s, flops, moved_bytes
from fxmem.errors import OptionError
from fxmem.ir import sizes

aten = torch.ops.aten


def _tensor(owner: int, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    example = torch.empty(shape, dtype=dtype, device="meta")
    return TensorSpec(shape, example.stride(), dtype, "cpu", owner, example.nbytes)


def _mm(m: int, k: int, n: int, dtype: torch.dtype = torch.float32) -> Call:
    args = (_tensor(0, m, k, dtype=dtype), _tensor(1, k, n, dtype=dtype))
    return Call(aten.mm.default, args, {}, (_tensor(0, m, n, dtype=dtype),))


def test_flops_are_torchs_own() -> None:
    assert flops(_mm(3, 5, 7)) == 2 * 3 * 5 * 7
    add = Call(aten.add.Tensor, (_tensor(0, 8), _tensor(1, 8)), {}, (_tensor(0, 8),))
    assert flops(add) == 0
    assert moved_bytes(add) == 3 * 8 * 4


@pytest.mark.parametrize("backward", [False, True])
def test_every_variant_of_attention_counts_as_flash_attention(backward: bool) -> None:
    shape, suffix = (2, 4, 16, 8), "_backward" if backward else ""
    args: tuple[Any, ...] = tuple(_tensor(i, *shape) for i in range(4 if backward else 3))
    outputs = tuple(_tensor(i, *shape) for i in range(3 if backward else 1))
    op = getattr(aten, "_scaled_dot_product_flash_attention_for_cpu" + suffix).default
    forward_flops = 2 * 2 * 2 * 4 * 16 * 16 * 8
    expected = forward_flops * 5 // 2 if backward else forward_flops
    assert flops(Call(op, args, {}, outputs)) == expected


def test_large_products_are_bound_by_arithmetic_and_sums_by_memory() -> None:
    spec = device_spec("h100-80g")
    slow, fast = estimate_s(_mm(4096, 4096, 4096), spec), estimate_s(_mm(4096, 4096, 4096, torch.bfloat16), spec)
    peak_ratio = spec.flop_per_s["bfloat16"] / spec.flop_per_s["float32"]
    assert (slow - spec.launch_s) / (fast - spec.launch_s) == pytest.approx(peak_ratio)
    n = 1 << 28
    add = Call(aten.add.Tensor, (_tensor(0, n), _tensor(1, n)), {}, (_tensor(0, n),))
    assert estimate_s(add, spec) / estimate_s(add, device_spec("h200")) == pytest.approx(4.8 / 3.35, rel=0.01)


def test_an_embedding_reads_the_rows_it_returns() -> None:
    ids = _tensor(1, 10, dtype=torch.int64)
    call = Call(aten.embedding.default, (_tensor(0, 100_000, 8), ids), {}, (_tensor(0, 10, 8),))
    assert moved_bytes(call) == 2 * 10 * 8 * 4 + 10 * 8


def test_every_preset_loads_and_has_links() -> None:
    names = {"h100-80g", "h200", "a100-80g", "a100-40g", "l40s", "rtx4090", "v100-32g", "cpu"}
    assert names == set(preset_names())
    for name in names:
        spec = device_spec(name)
        assert spec.name == name
        links = spec.machine().links
        assert links["host"].out_bytes_per_s == pytest.approx(spec.links["host"].out_bytes_per_s * PLANNING_FACTOR)
        assert set(spec.machine(("disk",)).links) == {"disk"}


def test_an_unknown_spec_names_the_choices() -> None:
    with pytest.raises(OptionError, match=r"'h1'.*a100-40g.*rtx4090"):
        device_spec("h1")


@pytest.mark.parametrize("change", [{"memory_bytes": 0}, {"colour": 1}, {"links": {"moon": {}}}, None, {"links": 3}])
def test_a_spec_file(tmp_path: Path, change: dict[str, Any] | None) -> None:
    preset = Path(device_spec.__code__.co_filename).parent / "devices" / "cpu.json"
    data = json.loads(preset.read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**data, "name": "mine"}))
    assert device_spec(path).name == "mine"
    assert device_spec(str(path)) == device_spec(device_spec(path))
    path.write_text("{" if change is None else json.dumps({**data, **change}))
    with pytest.raises(OptionError, match="malformed"):
        device_spec(path)


def test_rounding_up_stays_simple_where_it_can() -> None:
    s = sizes.symbol("s")
    assert round_up(1, 512) == 512
    assert round_up(0, 512) == 0
    assert round_up(1024 * s + 512, 512) == 1024 * s + 512
    rounded = round_up(100 * s, 512)
    assert [sizes.evaluate(rounded, {"s": v}) for v in (1, 5, 6)] == [512, 512, 1024]
