"""An FX pass of your own, tested on random graphs: the first version has a fault that the test finds."""

import torch
from hypothesis import HealthCheck, Phase, given, settings
from torch import fx

from fxmem.testing import check_pass, graph_modules

QUICK = settings(
    deadline=None, max_examples=30, phases=[Phase.generate], derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def halve_twice(gm: fx.GraphModule) -> None:
    """Multiply by 0.25 instead of by 0.5 twice. The fault: it forgets who else reads the first product."""
    for node in list(gm.graph.nodes):
        source = node.args[0] if node.args else None
        if _halves(node) and isinstance(source, fx.Node) and _halves(source):
            first = source.args[0]
            source.replace_all_uses_with(node)
            node.args = (first, 0.25)
            gm.graph.erase_node(source)
    gm.recompile()


def halve_twice_fixed(gm: fx.GraphModule) -> None:
    """The same, leaving the first product to its other readers."""
    for node in list(gm.graph.nodes):
        source = node.args[0] if node.args else None
        if _halves(node) and isinstance(source, fx.Node) and _halves(source):
            node.args = (source.args[0], 0.25)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _halves(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.mul.Tensor and node.args[1:] == (0.5,)


def halves() -> fx.GraphModule:
    """x -> (x * 0.5, x * 0.5 * 0.5)."""
    graph = fx.Graph()
    once = graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 0.5))
    graph.output((once, graph.call_function(torch.ops.aten.mul.Tensor, (once, 0.5))))
    return fx.GraphModule(torch.nn.Module(), graph)


def main() -> None:
    x = (torch.tensor([2.0, 3.0]),)
    try:
        check_pass(halve_twice, halves(), x)
    except AssertionError as error:
        print(f"found: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("the fault was not found")
    check_pass(halve_twice_fixed, halves(), x)

    @QUICK
    @given(graph_modules())
    def on_random_graphs(graph: fx.GraphModule) -> None:
        check_pass(halve_twice_fixed, graph)

    on_random_graphs()
    print("the fixed pass keeps what every graph does")


if __name__ == "__main__":
    main()
