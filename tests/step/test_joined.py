"""Programs of several graphs as one: the same bytes as alone, the schedule taken apart and put together again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxmem.ir.program import Fission, Op, Program, Storage
from fxmem.ir.program import Part as SplitPart
from fxmem.planners.plan import baseline_actions, make_plan
from fxmem.planners.problem import reduce_program
from fxmem.report.regions import regions_of
from fxmem.schedule import simulate
from fxmem.step.joined import Beside, Made, Part, join
from fxmem.testing import programs, schedules


def part_of(program: Program, key: object = "held") -> Part:
    """A call all of whose inputs stood before, and each of whose gradients is one of an input of its own."""
    assume(len(program.resident) >= len(program.backward_outputs))
    gradients = dict(zip(range(len(program.backward_outputs)), program.resident, strict=False))
    program = replace(program, extra_resident_bytes=0)  # what stands beside calls is said of all of them together
    return Part(program, {s: (key, s) for s in program.resident}, gradients)


@given(st.data())
def test_one_call_has_the_bytes_that_it_has_alone(data: st.DataObject) -> None:
    program = replace(data.draw(programs()), extra_resident_bytes=0)
    actions = data.draw(schedules(program))
    joined = join([part_of(program)], [0])
    merged = joined.merge([actions])
    assert simulate(joined.program, merged).peak_bytes == simulate(program, actions).peak_bytes
    assert simulate(program, joined.split(merged)[0]).peak_bytes == simulate(program, actions).peak_bytes


@settings(max_examples=settings.default.max_examples // 2)  # of two programs each, with their schedules
@given(st.data())
def test_calls_in_flight_together_stand_on_each_other(data: st.DataObject) -> None:
    """What earlier calls save stands under later ones, and what stands beside them in every segment."""
    first, second = (replace(data.draw(programs()), extra_resident_bytes=0) for _ in range(2))
    schedules_of = [data.draw(schedules(first)), data.draw(schedules(second))]
    parts = [part_of(first, "first"), part_of(second, "second")]
    beside = Beside(throughout=100, during={("backward", 0): 7})
    bare, joined = join(parts, [1, 0]), join(parts, [1, 0], beside)
    peaks = [simulate(one.program, one.merge(schedules_of)).peak_bytes for one in (bare, joined)]
    assert 100 <= peaks[1] - peaks[0] <= 107
    alone = [simulate(p, a).peak_bytes for p, a in zip((first, second), schedules_of, strict=True)]
    assert peaks[0] >= max(alone)
    again = joined.split(joined.merge(schedules_of))
    assert joined.merge(again) == joined.merge(schedules_of)



def test_split_regions_are_numbered_through_all_calls() -> None:
    def split(dim: int) -> Program:
        ops = (
            Op(0, "x", "input", "forward", (), (0,), is_input=True),
            *(Op(1 + i, f"f_part{i}", "f", "forward", (0,), (1 + i,), part=SplitPart("f", i, 0)) for i in range(2)),
            Op(3, "sum", "sum", "forward", (1, 2), (3,)),
        )
        program = Program("p", ops, tuple(Storage(i, 8) for i in range(4)), (3,), ())
        return replace(program, fissions=(Fission(0, dim, (0, 1, 2)),), unsplit=program)

    joined = join([Part(split(dim), {0: ("held", dim)}, {}) for dim in (0, 1)], [1, 0]).program
    assert [fission.dim for fission in joined.fissions] == [0, 1]
    assert [(op.part.region, op.part.number) for op in joined.ops if op.part] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [region.fission.dim for region in regions_of(joined)] == [0, 1]


def test_a_value_that_another_call_takes_is_one_storage_and_made_once() -> None:
    def op(index: int, region: str, args: tuple[int, ...], storages: tuple[int, ...], is_input: bool = False) -> Op:
        return Op(index, f"op{index}", "f", region, args, storages, is_input, 1.0)  # type: ignore[arg-type]

    first = Program(
        "first",
        (op(0, "forward", (), (0,), True), op(1, "forward", (0,), (1,)), op(2, "backward", (), (2,), True),
         op(3, "backward", (1, 2), (3,))),
        (Storage(0, 8), Storage(1, 100), Storage(2, 100), Storage(3, 8)),
        (1,), (3,),
    )  # fmt: skip
    second = Program(
        "second",
        (op(0, "forward", (), (0,), True), op(1, "forward", (0,), (1,)), op(2, "backward", (), (2,), True),
         op(3, "backward", (0, 2), (3,))),
        (Storage(0, 100), Storage(1, 4), Storage(2, 4), Storage(3, 100)),
        (1,), (3,),
    )  # fmt: skip
    parts = [
        Part(first, {0: "x"}, {0: 0}, frozenset({0})),
        Part(second, {0: Made(0, 0)}, {0: 0}),
    ]
    joined = join(parts, [1, 0])
    assert sum(storage.nbytes == 100 for storage in joined.program.storages) == 3  # value, gradient, tangent
    producer = next(o for o in joined.program.ops if o.name == "op1")
    assert not producer.recomputable
    run = simulate(joined.program, baseline_actions(reduce_program(joined.program)))
    # in the first call's backward: x, the value, the loss, the tangent made of the value's gradient, x's gradient
    assert run.peak_bytes == 8 + 100 + 4 + 100 + 8
    plan = make_plan(joined.program, "min")
    assert plan.peak_bytes == run.peak_bytes
