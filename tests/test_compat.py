"""Every private torch name that fxmem relies on does what fxmem thinks it does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxmem import compat


def test_storage_of_views_of_fake_tensors() -> None:
    with compat.FakeTensorMode():
        x = torch.empty(4, 6)
        assert compat.storage_key(x.t()) == compat.storage_key(x[1:]) == compat.storage_key(x)
        assert compat.storage_key(x.clone()) != compat.storage_key(x)
        assert compat.storage_nbytes(x[0]) == 96
        assert compat.storage_nbytes(x[:1].expand(9, 6)) == 96


def test_boxed_code_is_compiled_before_its_first_call() -> None:
    module = torch.fx.symbolic_trace(nn.ReLU())
    module.graph.set_codegen(compat.BoxedCodeGen())
    forward = compat.recompiled(module)
    args = [torch.tensor([-1.0])]
    assert forward(args).item() == 0
    assert args == []


def test_error_on_graph_break_leaves_data_dependence_a_break() -> None:
    """Unlike fullgraph=True, which captures `.item()` and so makes another graph than the user's compile will."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    compiled = compat.isolated_compile(function, lambda module, inputs: module)
    with compat.error_on_graph_break(True), pytest.raises(compat.TorchDynamoException):
        compiled(torch.ones(2))


@pytest.mark.parametrize("can_isolate", [True, False], ids=["own torch", "oldest torch"])
def test_isolated_compilations_do_not_share_a_recompile_limit(
    can_isolate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_compiled = 0
    monkeypatch.setattr(compat.dynamo, "CAN_ISOLATE", can_isolate and compat.dynamo.CAN_ISOLATE)

    def backend(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        nonlocal num_compiled
        num_compiled += 1
        return module

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for _ in range(10):
        compat.isolated_compile(function, lambda module, inputs: backend(module, inputs))(torch.ones(2))
    assert num_compiled == 10


def test_the_compiling_flag_is_restored() -> None:
    with compat.seen_as_compiling():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_hint_of_a_plain_size() -> None:
    assert compat.hint(3) == 3


def test_aot_export_describes_inputs_and_records_sources() -> None:
    import contextlib

    with contextlib.ExitStack() as stack, compat.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        module = nn.Sequential(nn.Linear(2, 2))
        x = torch.ones(3, 2)
        assert mode is not None
        graph = compat.aot_export_joint(stack, module, (x,), {})
    descriptions = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder")]
    assert [d.target for d in descriptions if isinstance(d, compat.ParamAOTInput)] == ["0.weight", "0.bias"]
    assert any(isinstance(d, compat.TangentAOTInput) for d in descriptions)


def test_code_of_a_module_of_a_graph_is_generated_when_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[torch.fx.Graph] = []
    original = torch.fx.Graph.python_code

    def python_code(graph: torch.fx.Graph, *args: object, **options: object) -> object:
        generated.append(graph)
        return original(graph, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.fx.Graph, "python_code", python_code)
    graph = torch.fx.symbolic_trace(nn.ReLU()).graph
    generated.clear()
    module = compat.module_of_graph(nn.Module(), graph)
    assert generated == []
    assert module(torch.tensor(-1.0)).item() == 0
    assert len(generated) == 1


@pytest.mark.filterwarnings("ignore")
def test_storages_of_real_sparse_tensors_are_found_while_others_are_traced() -> None:
    matrix = torch.eye(3).to_sparse_csr()
    with compat.FakeTensorMode():
        parts = compat.strided_parts(matrix)
    assert [type(part) for part in parts] == [torch.Tensor] * 3
