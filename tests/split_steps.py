"""Captured steps for tests of fission: split, run on real tensors, and compared with the step as it was."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxmem.analysis.region import Region
from fxmem.analysis.regions import Fission, grow
from fxmem.capture import JointGraph, capture
from fxmem.passes import run_passes
from fxmem.passes.fission import SplitRegions
from fxmem.passes.normal_form import LossNormalForm


class Step:
    """One step of `module`: its joint graph with losses in normal form, and the tensors to run it with."""

    def __init__(self, module: nn.Module, args: Sequence[Tensor], context: Callable[[], Any] | None = None) -> None:
        self.module, self.args = module, args
        (joint,) = capture(module, args) if context is None else _captured(module, args, context)
        self.joint = run_passes(joint, [LossNormalForm()]).joint

    def index(self, name: str) -> int:
        return [node.name for node in self.joint.nodes].index(name)

    def largest(self, target: Any) -> int:
        """Index of the op of `target` with the largest result, the first of several."""
        nodes = self.joint.nodes
        ops = [i for i, n in enumerate(nodes) if n.target is target]
        return max(ops, key=lambda i: (nodes[i].meta["val"].numel(), -i))

    def fission(self, seed: int, dim: int = 0, num_parts: int = 2, **options: Any) -> Fission:
        size = self.joint.nodes[seed].meta["val"].shape[dim]
        return Fission(seed, dim, (*range(0, size, -(-size // num_parts)), size), **options)

    def loss(self, num_parts: int = 2, fuse: bool = False) -> Fission:
        """The loss, from the scores on."""
        seed = self.largest(torch.ops.aten._log_softmax.default)
        value = self.joint.nodes[seed].meta["val"]
        return self.fission(seed, 0, num_parts, fuse=fuse, min_bytes=value.numel() * value.element_size() // 3)

    def whole(self, num_parts: int = 2, fuse: bool = False) -> Fission:
        """All of the step, along the first dim of the first argument."""
        static = set(self.joint.static_inputs)
        inputs = (n for n in self.joint.nodes if n.op == "placeholder" and n.name not in static)
        return self.fission(self.index(next(inputs).name), 0, num_parts, fuse=fuse)

    def fissions(self, seed: int) -> Iterator[Fission]:
        """Splits in two of one tensor, along each of its dims, that leave something in parts."""
        value = self.joint.nodes[seed].meta["val"]
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            for fuse in (False, True) if size > 1 else ():
                fission = self.fission(seed, dim, fuse=fuse)
                if not self.region(fission).refused:
                    yield fission

    def region(self, fission: Fission) -> Region:
        return grow(self.joint, fission)

    def split(self, *fissions: Fission) -> JointGraph:
        return run_passes(self.joint, [SplitRegions(fissions)]).joint

    def run(self, joint: JointGraph, tangent: float = 1.0) -> list[Tensor | None]:
        """Outputs of `joint`, under the same random seed each time."""
        args = [*self.inputs(joint), *(self._value(n, joint, tangent) for n in joint.nodes if n.name in joint.tangents)]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            interpreter = fx.Interpreter(joint.graph_module)
            return list(interpreter.run(*args, enable_io_processing=False))

    def assert_same(self, fission: Fission, tangent: float = 1.0, tolerance: float = 1e-5) -> JointGraph:
        """Split, and compare: gradients by the norm of the difference, with a floor for those that are zero."""
        split = self.split(fission)
        before, after = self.run(self.joint, tangent), self.run(split, tangent)
        assert_close(before, after, tolerance)
        loss, split_loss = before[0], after[0]
        assert loss is not None
        assert split_loss is not None
        assert abs(float(split_loss - loss)) <= tolerance / 10 * abs(float(loss))
        return split

    def inputs(self, joint: JointGraph) -> list[Tensor]:
        """What forward is called with."""
        left = iter(self.args)
        nodes = [node for node in joint.nodes[: joint.num_forward_nodes] if node.op == "placeholder"]
        values = [self._value(node, joint, 1.0) for node in nodes]
        return [next(left).clone() if value is None else value for value in values]

    def _value(self, node: fx.Node, joint: JointGraph, tangent: float) -> Tensor | None:
        """A parameter, a buffer, or a tangent; None for an argument."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        named |= dict(self.module.named_buffers(remove_duplicate=False))
        if node.name in joint.names:
            return named[joint.names[node.name]].detach().clone()
        value = node.meta["val"]
        return torch.full(value.shape, tangent, dtype=value.dtype) if node.name in joint.tangents else None


def assert_close(before: Sequence[Tensor | None], after: Sequence[Tensor | None], tolerance: float) -> None:
    """Same shapes, strides and dtypes; values by the norm of the difference, with a floor for what should be zero."""
    floor = max((float(t.float().norm()) for t in before if t is not None), default=0.0) * 1e-3
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
            error = float((one.float() - other.float()).norm()) / max(float(one.float().norm()), floor, 1e-12)
            assert error <= tolerance, f"output {number}: {error}"


def _captured(module: nn.Module, args: Sequence[Tensor], context: Callable[[], Any]) -> tuple[JointGraph, ...]:
    with context():
        return tuple(capture(module, args))
