"""The ops alone: tensors come back bit for bit, in their own layout; fake kernels agree."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxmem import compat
from fxmem.errors import OffloadError
from fxmem.runtime.transfers import ops
from fxmem.runtime.transfers.disk_file import DiskFile
from fxmem.runtime.transfers.layout import Slot, lay_out
from fxmem.runtime.transfers.ops import flat_bytes, laid_out
from fxmem.runtime.transfers.threads import ThreadEngine
from fxmem.schedule.actions import Tier

OPS = torch.ops.fxmem


@pytest.fixture(params=["host", "disk"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """An engine with two slots of 64 KiB."""
    tier: Tier = request.param
    engine = ThreadEngine(lay_out([Slot(i, 1 << 16, tier, 0, 1) for i in range(2)]), DiskFile(tmp_path))
    number = ops.register(engine)
    yield number
    ops.release(number)
    assert list(tmp_path.iterdir()) == []


def _nan_payloads() -> Tensor:
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x7FC0DEAD], dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


TENSORS: dict[str, Callable[[], Tensor]] = {
    "float": lambda: torch.randn(5, 7),
    "transposed": lambda: torch.randn(5, 7).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(5, 1).expand(5, 9),
    "strided": lambda: torch.randn(10, 10)[::2, ::3],
    "view in the middle": lambda: torch.randn(100)[20:40].view(4, 5),
    "scalar": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "nan": _nan_payloads,
    "bool": lambda: torch.rand(33) > 0.5,
    "complex": lambda: torch.randn(6, dtype=torch.complex64),
    **{
        str(dtype): lambda dtype=dtype: torch.randint(0, 255, (64,), dtype=torch.uint8).view(dtype)  # type: ignore[misc]
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.float64)
    },
}


def round_trip(x: Tensor, key: int, step: Tensor | None = None, slot: int = 0) -> tuple[Tensor, Tensor]:
    handle = OPS.free(OPS.offload(x, step, slot, key), x)
    back = OPS.reload(handle, x.size(), x.stride(), 0, x.dtype, x.device)
    return OPS.wait(back, handle), handle


@pytest.mark.parametrize("name", TENSORS)
def test_bitwise_round_trip(key: int, name: str) -> None:
    x = TENSORS[name]()
    back, _ = round_trip(x, key)
    assert (back.dtype, back.shape, back.stride()) == (x.dtype, x.shape, x.stride())
    assert torch.equal(flat_bytes(back), flat_bytes(x))


def test_strides_of_dimensions_of_one_element_come_back(key: int) -> None:
    """They mean nothing for where bytes lie, but convolutions choose the layout of gradients by them."""
    x = torch.randn(1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    back, _ = round_trip(x, key)
    assert back.stride() == x.stride() == (32, 1, 8, 2)


def test_storage_offset_and_rest_of_the_storage(key: int) -> None:
    """`offset` elements before the tensor and the rest of its storage travel with it: other views are made again."""
    whole = torch.arange(100.0)
    x = whole[20:40].view(4, 5)
    handle = OPS.offload(x, None, 0, key, 20, 100)
    handle = OPS.free(handle, x)
    back = OPS.wait(OPS.reload(handle, x.size(), x.stride(), 20, x.dtype, x.device), handle)
    assert (back.storage_offset(), back.untyped_storage().nbytes()) == (20, 400)
    assert torch.equal(back, x)
    assert torch.equal(back.as_strided((100,), (1,), 0), whole)


@pytest.mark.parametrize("stride", [(60, 20, 5, 1), (60, 1, 15, 3), (1, 2, 6, 24)])
def test_a_tensor_that_is_not_laid_out_as_planned_comes_back_as_planned(key: int, stride: tuple[int, ...]) -> None:
    """A compiler may choose another layout than the graph's, but what reads the reload was compiled for the graph's."""
    x = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    handle = OPS.free(OPS.offload(x, None, 0, key, 0, -1, stride), x)
    back = OPS.wait(OPS.reload(handle, x.size(), stride, 0, x.dtype, x.device), handle)
    assert back.stride() == stride
    assert torch.equal(back, x)


def test_a_tensor_that_is_not_of_the_planned_type_comes_back_as_planned(key: int) -> None:
    """Torch says that a batch norm's statistics are of another type than its kernel returns."""
    x = torch.tensor([1.0, 2.5, -3.0], dtype=torch.bfloat16)
    handle = OPS.free(OPS.offload(x, None, 0, key, 0, -1, (1,), torch.float32), x)
    back = OPS.wait(OPS.reload(handle, x.size(), (1,), 0, torch.float32, x.device), handle)
    assert back.dtype == torch.float32
    assert torch.equal(back, x.float())
    with pytest.raises(OffloadError, match=r"should return torch.float16 returned torch.float32"):
        OPS.offload(x.float(), None, 0, key, 0, -1, (1,), torch.float16)


def test_strides_that_place_nothing_do_not_matter() -> None:
    x = torch.ones(1, 3)
    assert laid_out(x, (77, 1)) is x
    assert laid_out(x, (3, 2)) is not x


def test_bytes_never_reach_beyond_the_storage() -> None:
    assert flat_bytes(torch.zeros(10)[5:], 0, 100).numel() == 20


def test_handle_keeps_the_step(key: int) -> None:
    engine = ops.engine_of(key)
    x = torch.randn(4)
    back, handle = round_trip(x, key)
    view = handle.detach().view(3)
    del handle
    assert engine.levels().num_steps == 1
    second, other = round_trip(x + 1, key, view, slot=1)
    assert torch.equal(second, x + 1)
    assert engine.levels().num_steps == 1, "it joined the step of the handle it was given"
    del view, other
    assert engine.levels().num_steps == 0
    assert torch.equal(back, x)


def test_a_copied_handle_is_named_with_what_copies_handles(key: int) -> None:
    x = torch.randn(4)
    _, handle = round_trip(x, key)
    copied = handle.clone()
    del handle
    with pytest.raises(OffloadError, match="save_on_cpu"):
        OPS.reload(copied, x.size(), x.stride(), 0, x.dtype, x.device)


def test_handle_as_saved_tensor(key: int) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            _, handle = round_trip(x, key)
            ctx.save_for_backward(handle)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (handle,) = ctx.saved_tensors
            x = OPS.wait(OPS.reload(handle, (3,), (1,), 0, torch.float32, grad.device), handle)
            return 2 * x * grad

    engine = ops.engine_of(key)
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = Square.apply(x).sum()
    gc.collect()
    assert engine.levels().num_steps == 1
    out.backward(retain_graph=True)
    out.backward()
    assert torch.equal(x.grad, torch.tensor([4.0, 8.0, 12.0]))  # type: ignore[arg-type]
    skipped = Square.apply(x).sum()
    del skipped, out
    gc.collect()
    assert engine.levels().num_steps == 0


def test_fake_kernels_agree() -> None:
    x = torch.randn(5, 7).t()
    with compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        back, handle = round_trip(fake, key=0)
    assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
    assert (handle.shape, handle.dtype, handle.device.type) == ((3,), torch.int64, "cpu")


def test_schemas_declare_aliasing() -> None:
    wait = OPS.wait.default._schema
    assert wait.arguments[0].alias_info.before_set == wait.returns[0].alias_info.before_set != set()
    for name in ("offload", "free", "reload"):
        assert all(a.alias_info is None for a in getattr(OPS, name).default._schema.arguments)


def test_unknown_engine_is_named() -> None:
    with pytest.raises(OffloadError, match="no engine 123456789"):
        OPS.offload(torch.ones(3), None, 0, 123456789)


def test_owners_share_an_engine(tmp_path: Path) -> None:
    engine = ThreadEngine(lay_out([Slot(0, 64, "host", 0, 1)]))
    number = ops.register(engine)
    ops.register(engine, number)
    ops.release(number)
    assert torch.equal(round_trip(torch.ones(3), number)[0], torch.ones(3))
    ops.release(number)
    ops.release(number)
    with pytest.raises(OffloadError, match="no engine"):
        ops.engine_of(number)
