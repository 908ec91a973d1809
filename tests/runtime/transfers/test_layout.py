"""Offsets on the tiers: no two live slots overlap, and little room is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxmem.ir.program import Op, Program, Storage
from fxmem.runtime.transfers.layout import FreeList, Slot, lay_out, pack, plan_layout
from fxmem.schedule.actions import Compute, Free, Offload, Recompute, Reload, StartBackward, Wait

periods = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 9)).map(lambda p: (p[0], p[0] + p[1], p[2])),
    max_size=40,
)


@given(periods)
def test_pack_never_overlaps(blocks: list[tuple[int, int, int]]) -> None:
    spans = [(first, last) for first, last, _ in blocks]
    sizes = [size for _, _, size in blocks]
    offsets, total = pack(spans, sizes)
    for i, (first, last) in enumerate(spans):
        assert 0 <= offsets[i] <= offsets[i] + sizes[i] <= total
        for j in range(i):
            together = first <= spans[j][1] and spans[j][0] <= last and sizes[i] and sizes[j]
            apart = offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]
            assert apart or not together
    most = max((sum(sizes[i] for i, (a, b) in enumerate(spans) if a <= t <= b) for t in range(61)), default=0)
    assert most <= total <= 2 * most + 9 * len(blocks) * bool(most)


def test_saved_tensors_pack_without_loss() -> None:
    """Last out, first back, as backward reads them: the total is the most that is ever there."""
    blocks = [(i, 100 - i) for i in range(30)]
    sizes = [64 * (1 + i % 5) for i in range(30)]
    assert pack(blocks, sizes)[1] == sum(sizes)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_free_list_coalesces(steps: list[tuple[bool, int]]) -> None:
    free_list, held = FreeList(), []
    for is_allocation, number in steps:
        if is_allocation:
            held.append((free_list.allocate(number), number))
        elif held:
            free_list.release(*held.pop(number % len(held)))
        assert free_list.used_bytes == sum(size for _, size in held)
    while held:
        free_list.release(*held.pop(0))
    assert free_list.allocate(free_list.end or 1) == 0, "everything was released, so it is one hole"


def _program() -> Program:
    ops = (
        Op(0, "x", "input", "forward", (), (0,), is_input=True),
        Op(1, "a", "f", "forward", (0,), (1,)),
        Op(2, "b", "g", "forward", (1,), (2,)),
        Op(3, "gb", "dg", "backward", (1, 2), (3,)),
        Op(4, "ga", "df", "backward", (1, 3), (4,)),
    )
    return Program("p", ops, tuple(Storage(i, 1000 + i) for i in range(5)), (2,), (4,))


def test_slots_of_a_schedule() -> None:
    actions = [
        *(Compute(1), Offload(1, "disk"), Compute(2), Free(1), StartBackward(), Reload(1), Wait(1), Compute(3)),
        *(Reload(1), Wait(1), Recompute(1), Offload(1, "host"), Free(1), Reload(1), Wait(1), Compute(4)),
    ]
    layout = plan_layout(_program(), actions, staged=True)
    assert [(s.storage, s.nbytes, s.tier, s.first, s.last) for s in layout.slots] == [
        (1, 1001, "disk", 1, 9),  # until its last reload is over
        (1, 1001, "host", 11, 14),  # a new value: a new slot
    ]
    assert layout.slots[0].stages == ((1, 3), (5, 6), (8, 9))
    assert layout.slots[0].stage_offsets == (0, 0, 0)  # staged one after the other: the same host memory
    assert (layout.host_bytes, layout.disk_bytes, layout.stage_bytes) == (1024, 4096, 4096)


def test_layout_follows_sizes() -> None:
    layout = lay_out([Slot(i, 100, "host", 0, 1) for i in range(3)])
    assert [slot.offset for slot in layout.slots] == [0, 128, 256]
    assert [slot.offset for slot in layout.resized([1000, 64, 64]).slots] == [0, 1024, 1088]
