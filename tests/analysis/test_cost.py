"""Costs: measured once, cached, harmless to the caller, and right enough for the simulator to match the allocator."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from fxmem import compat
from fxmem.analysis import cost, profile
from fxmem.analysis.calls import Call, TensorSpec, call_of
from fxmem.analysis.liveness import plain_actions
from fxmem.capture import JointGraph, capture
from fxmem.errors import VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.schedule import simulate

Captured = tuple[nn.Module, JointGraph]


def _costs(captured: Captured, **options: Any) -> tuple[Program, cost.Costs]:
    program = program_from_joint(captured[1])
    return program, cost.find_costs(program, captured[1].graph_module, **options)


def test_every_op_that_owns_bytes_takes_time_and_the_others_none(conv_net: Captured) -> None:
    program, costs = _costs(conv_net)
    for op in program.ops:
        assert (costs.seconds[op.index] > 0) == (not op.is_input and not program.is_folded(op)), op
    assert not costs.notes


def test_simulated_peak_equals_the_allocators(conv_net: Captured) -> None:
    program, costs = _costs(conv_net)
    program = costs.apply(program)
    assert any("convolution" in op.target and op.workspace_bytes > 0 for op in program.ops)
    assert simulate(program, plain_actions(program)).peak_bytes == _allocator_peak_bytes(*conv_net)


def _allocator_peak_bytes(model: nn.Module, joint: JointGraph) -> int:
    """Peak of the unplanned joint graph, run as it is."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    args = [_argument(n, state[joint.names[n.name]] if n.name in joint.names else None) for n in placeholders]
    resident = {compat.storage_key(a): a.untyped_storage().nbytes() for a in args}
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph_module.graph, {}))
    graph.set_codegen(compat.BoxedCodeGen())
    module = fx.GraphModule(joint.graph_module, graph)
    with torch.no_grad():
        _, deltas = compat.cpu_memory_deltas(lambda: module.forward(list(args)))
    # `args` outlive the run: the profiler can report the release of older memory with the size of an earlier block
    return sum(resident.values()) + max(itertools.accumulate(deltas))


def _argument(node: fx.Node, value: torch.Tensor | None) -> torch.Tensor:
    fake = node.meta["val"]
    return torch.zeros(fake.shape, dtype=fake.dtype) if value is None else value.detach().clone()


def test_measuring_leaves_the_random_state_alone(conv_net: Captured) -> None:
    before = torch.get_rng_state()
    _costs(conv_net)
    assert torch.equal(before, torch.get_rng_state())


def test_measuring_works_inside_tracing_modes_and_autocast(conv_net: Captured) -> None:
    with compat.FakeTensorMode(), torch.autocast("cpu", dtype=torch.bfloat16):
        _, costs = _costs(conv_net)
    assert not costs.notes


def test_each_signature_is_measured_once_and_never_again(
    conv_net: Captured, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []
    original = profile.measure_call
    monkeypatch.setattr(profile, "measure_call", lambda call: (measured.append(call.key), original(call))[1])
    _, first = _costs(conv_net)
    assert len(measured) == len(set(measured)) > 0
    _, second = _costs(conv_net)
    assert len(measured) == len(set(measured))
    assert first == second
    (file,) = cache_directory.iterdir()
    assert torch.__version__.replace("+", "_") in file.name.replace("+", "_")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"KEY": [1]}', '{"KEY": ["x", {}, 3]}', '{"KEY": null}'])
def test_a_damaged_cache_is_measured_again(conv_net: Captured, cache_directory: Path, text: str) -> None:
    program, _ = _costs(conv_net)
    (file,) = cache_directory.iterdir()
    keys = list(json.loads(file.read_text()))
    file.write_text(text.replace("KEY", keys[0]))
    _, costs = _costs(conv_net)
    assert not costs.notes
    assert all(costs.seconds[op.index] for op in program.ops if not op.is_input and not program.is_folded(op))
    assert set(json.loads(file.read_text())) == set(keys)


def test_an_unwritable_cache_is_no_error(conv_net: Captured, cache_directory: Path) -> None:
    cache_directory.write_text("a file where the directory should be")
    assert not _costs(conv_net)[1].notes


def test_out_of_time_ops_are_estimated_with_a_note(conv_net: Captured) -> None:
    program, costs = _costs(conv_net, limit_s=0.0)
    scheduled = [op for op in program.ops if not op.is_input and not program.is_folded(op)]
    assert set(costs.notes) == {op.name for op in scheduled}
    assert all("time limit" in note for note in costs.notes.values())
    assert all(costs.seconds[op.index] > 0 for op in scheduled)


def test_an_op_too_big_for_memory_is_estimated(conv_net: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "free_bytes", lambda _: 1000)
    allocated: list[int] = []
    monkeypatch.setattr(profile, "_materialize", lambda spec, _: allocated.append(spec.nbytes))
    _, costs = _costs(conv_net)
    assert any("quarter of the free memory" in note for note in costs.notes.values())
    assert sum(allocated) < 1000 * len(allocated)
    assert max(allocated, default=0) <= 250


def test_an_op_that_fails_alone_is_estimated(conv_net: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: Call) -> profile.Measured:
        if "convolution" in call.op_name:
            raise RuntimeError("only inside a model\nsecond line")
        return profile.Measured(1e-3, 5, tuple(-1 for _ in range(1)))

    monkeypatch.setattr(profile, "measure_call", fail)
    program, costs = _costs(conv_net)
    assert {name.split("_")[0] for name in costs.notes} == {"convolution"}
    assert all("only inside a model" in note for note in costs.notes.values())
    by_name = {op.name: op.index for op in program.ops}
    assert all(costs.seconds[by_name[name]] > 0 for name in costs.notes)


def test_meta_tensors_are_estimated() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1 << 20, 1 << 14), nn.ReLU()), torch.empty(1 << 10, 1 << 20)
    (joint,) = capture(model, (x,), device="meta")
    _, costs = _costs((model, joint))
    assert sum(costs.seconds) > 1
    assert _costs((model, joint), spec="h100-80g")[1].seconds < costs.seconds


def test_a_device_spec_rounds_allocations(conv_net: Captured) -> None:
    program, costs = _costs(conv_net, spec="a100-80g")
    assert all(isinstance(n, int) and n % 512 == 0 for n in costs.storage_bytes)
    assert all(n >= s.nbytes > n - 512 for n, s in zip(costs.storage_bytes, program.storages, strict=True))


def test_output_bytes_follow_the_real_allocation(conv_net: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    original = profile.measure_call

    def grown(call: Call) -> profile.Measured:
        found = original(call)
        if call.op_name != "convolution":
            return found
        return profile.Measured(found.seconds, found.workspace_bytes, (found.storage_bytes[0] + 64,))

    monkeypatch.setattr(profile, "measure_call", grown)
    program, costs = _costs(conv_net)
    differing = {
        program.ops[program.producer[s.id]].target: costs.storage_bytes[s.id] - s.nbytes
        for s in program.storages
        if costs.storage_bytes[s.id] != s.nbytes
    }
    assert differing == {"aten.convolution.default": 64}


def test_another_graph_is_refused(conv_net: Captured) -> None:
    program = program_from_joint(conv_net[1])
    with pytest.raises(VerifyError, match="differ"):
        cost.annotate(program, fx.GraphModule({}, fx.Graph()))


def test_symbolic_sizes_are_measured_at_their_hints() -> None:
    (joint,) = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.ones(6, 8),), dynamic=True)
    program = program_from_joint(joint)
    assert program.is_symbolic
    calls = [call_of(n, program.hints) for n in joint.nodes if n.op == "call_function" and "mm" in str(n.target)]
    assert (6, 8) in {spec.shape for call in calls for spec in call.tensors}
    annotated = cost.annotate(program, joint.graph_module)
    assert [s.nbytes for s in annotated.storages] == [s.nbytes for s in program.storages]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (torch.ops.aten.embedding.default, [("f", (3, 4)), ("i", (100,))]),
        (torch.ops.aten.embedding_dense_backward.default, [("f", (100, 4)), ("i", (100,)), 2, -1, False]),
        (torch.ops.aten.gather.default, [("f", (9, 2)), 1, ("i", (9, 2))]),
        (torch.ops.aten.index.Tensor, [("f", (5, 7)), [("i", (50,))]]),
        (torch.ops.aten.index_select.default, [("f", (5, 7)), 0, ("i", (50,))]),
        (torch.ops.aten.scatter.value, [("f", (5, 7)), 1, ("i", (5, 7)), 1.0]),
        (torch.ops.aten.nll_loss_forward.default, [("f", (9, 2)), ("i", (9,)), None, 1, -100]),
        (torch.ops.aten.nll_loss2d_forward.default, [("f", (9, 2, 30, 30)), ("i", (9, 30, 30)), None, 1, -100]),
        (torch.ops.aten.masked_fill.Scalar, [("f", (9, 2)), ("b", (9, 2)), 0.0]),
    ],
)
def test_invented_indices_are_in_range(op: Any, args: list[Any]) -> None:
    dtypes = {"f": torch.float32, "i": torch.int64, "b": torch.bool}
    owners = itertools.count()

    def spec(value: Any) -> Any:
        if isinstance(value, list):
            return [spec(v) for v in value]
        if not isinstance(value, tuple):
            return value
        example = torch.empty(value[1], dtype=dtypes[value[0]])
        return TensorSpec(tuple(value[1]), example.stride(), example.dtype, "cpu", next(owners), 0)

    made = tuple(spec(arg) for arg in args)
    output = TensorSpec((), (), torch.float32, "cpu", 0, 4)
    num_outputs = 2 if "nll" in str(op) else 1
    assert profile.measure_call(Call(op, made, {}, (output,) * num_outputs)).seconds > 0


def test_invented_values_are_ordinary_numbers() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        values = profile._materialize(TensorSpec((3, 70000), (1, 3), dtype, "cpu", 0, 0), 1)
        assert values.stride() == (1, 3)
        assert 0.2 < float(values.min()) < float(values.max()) <= 1
    expanded = profile._materialize(TensorSpec((10, 4), (0, 1), torch.float32, "cpu", 0, 0), 1)
    assert expanded.untyped_storage().nbytes() == 16


@pytest.mark.gpu
def test_cuda_ops_are_measured_with_events() -> None:
    model, x = nn.Sequential(nn.Linear(256, 256), nn.GELU()).cuda(), torch.ones(64, 256, device="cuda")
    (joint,) = capture(model, (x,))
    _, costs = _costs((model, joint))
    assert not costs.notes
    assert sum(costs.seconds) > 0
    assert all(n % 512 == 0 for n in costs.storage_bytes)
