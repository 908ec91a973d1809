"""What a call was given, between its forward and its backward: the caller may overwrite it, or differentiate twice.

Compiled code can do neither: a plan that computes again from an input needs the input's old value, and AOTAutograd's
backward has no derivative. So a call keeps weak references to its arguments and their version counters. An input that
was overwritten is known by its counter: from then on nothing is computed again from it (`Graph.pin`). Until a kind of
step has held, copies in host memory rescue the step in which that is found out. A backward that is to be
differentiated itself (``create_graph=True``) is what autograd makes of the model's own code, run again from the
arguments: unplanned, but measured.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.capture.draws import draw_after, state_of
from fxmem.errors import CaptureError
from fxmem.step.measurement import paused

if TYPE_CHECKING:
    from fxmem.step.graph import Graph

_COPIED_BYTES = 1 << 20  # of a parameter: biases and norms, which plans read again, are small; tables are not
_LEAVE_OUT = (
    "leave the part of the model that is differentiated twice out of fxmem.compile, or call it as it was before "
    "(the module that was given to fxmem.compile is unchanged)"
)

_SMALL_FIRST = "take it on a smaller batch, or with a larger budget"


class Arguments:
    """Of one call of `graph`. With `copies` an overwritten input of the plan's does not end the step.

    `is_held`: they live until the backward, so that forward can be run again.
    """

    def __init__(
        self, graph: Graph, args: Sequence[Any], reread: frozenset[int], copies: bool, is_held: bool = False
    ) -> None:
        self.graph, self.reread = graph, reread
        self._held = tuple(args) if is_held else ()
        self._found = [weakref.ref(a) if isinstance(a, Tensor) else a for a in args]
        self._versions: list[int] = []
        self._states = {device: state_of(device) for device in graph.drawing_devices}
        self._copies: dict[int, Tensor] = {}
        if copies and reread:
            with paused():
                self._copies = {i: _on_host(args[i]) for i in reread if self._is_copied(i, args[i])}

    def forward_ended(self, args: Sequence[Any]) -> None:
        """What forward itself wrote to (running statistics) does not count as overwritten."""
        self._versions = [compat.version(a) if isinstance(a, Tensor) else 0 for a in args]

    def _is_copied(self, position: int, value: Any) -> bool:
        return position not in self.graph.captured.joint.static_indices or value.nbytes <= _COPIED_BYTES

    @property
    def values(self) -> list[Any]:
        """None for a tensor that is gone."""
        return [self._value(i) for i in range(len(self._found))]

    def _value(self, position: int) -> Any:
        """None for a tensor that is gone."""
        found = self._found[position]
        return found() if isinstance(found, weakref.ref) else found

    def drop(self) -> None:
        """No backward will ask for them."""
        self._copies.clear()
        self._held = ()

    def of_inputs(self, gradients: Sequence[Any]) -> list[Any]:
        """Those of `gradients` that are no parameter's."""
        pairs = enumerate(gradients[: len(self._found)])
        return [gradient for i, gradient in pairs if not isinstance(self._value(i), nn.Parameter)]

    def overwritten(self) -> list[int]:
        """Positions of those written to since forward that still exist."""
        tensors = ((i, self._value(i)) for i, found in enumerate(self._found) if isinstance(found, weakref.ref))
        return [i for i, t in tensors if t is not None and compat.version(t) != self._versions[i]]

    @contextlib.contextmanager
    def as_before(self, positions: Sequence[int]) -> Iterator[None]:
        """The inputs at `positions` have their old values. Raises CaptureError for one that was not copied."""
        missing = [i for i in positions if i not in self._copies]
        if missing:
            raise CaptureError(
                f"{' and '.join(map(self.graph.input_name, missing))} was overwritten in place between forward and "
                "backward, and the plan computes again from it. From the next step on it does not; to be right from "
                "the first step on, fxmem.keep(...) what forward makes of it"
            )
        tensors = [self._value(i) for i in positions]
        present = [_on_host(t) for t in tensors]
        written = [compat.version(t) for t in tensors]
        try:
            for i, tensor in zip(positions, tensors, strict=True):
                compat.write_back(tensor, self._copies[i], self._versions[i])
            yield
        finally:
            for tensor, value, version in zip(tensors, present, written, strict=True):
                compat.write_back(tensor, value, version)

    def differentiable(self, node: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None] | CaptureError:
        """The gradients of all arguments, as functions of arguments and `grads`: the model's own code run again.

        `node`: of autograd, for the compiled call. Returns an error where that can't be done.
        """
        args = self.values
        why = self._why_not_again(node, args)
        if why is not None:
            return _not_twice(why)
        inner = [a.view_as(a) if isinstance(a, Tensor) else a for a in args]  # each by itself, whatever made it
        outputs = self._run_again(self.graph.module, inner)
        if len(outputs) != len(grads):
            return _not_twice("forward returns a tensor that is a part of another or of an argument")
        roots = [(out, g) for out, g in zip(outputs, grads, strict=True) if _is_root(out, g)]
        wanted = [i for i, needed in enumerate(node.needs_input_grad) if needed]
        results: list[Tensor | None] = [None] * len(args)
        if roots and wanted:
            found = torch.autograd.grad(
                [out for out, _ in roots],
                [inner[i] for i in wanted],
                [g for _, g in roots],
                create_graph=True,
                allow_unused=True,
            )
            for i, gradient in zip(wanted, found, strict=True):
                results[i] = gradient
        return results

    def forward_again(self, code: Callable[..., Any]) -> Sequence[Any]:
        """What `code`, compiled of this graph, returns for the same arguments and draws. Raises CaptureError."""
        args = self.values
        why = self._why_changed(args)
        if why is not None:
            raise CaptureError(
                f"{why}, and this first step of its kind had no memory to save what forward made: {_SMALL_FIRST}"
            )
        with torch.enable_grad():
            return self._run_again(code, args)

    @property
    def can_run_again(self) -> bool:
        """Would forward do the same again? FSDP takes back what parameters hold between forward and backward."""
        values = self.values
        is_whole = all(not isinstance(a, Tensor) or _has_memory(a) for a in values)
        return is_whole and self.graph.may_run_twice and self._why_changed(values) is None

    def _run_again(self, code: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
        with self.graph.autocast(), contextlib.ExitStack() as stack:
            for device, state in self._states.items():
                stack.enter_context(draw_after(torch.from_numpy(state), device))
            outputs: Sequence[Any] = code(*args)
        return outputs

    def _why_not_again(self, node: Any, args: Sequence[Any]) -> str | None:
        why = self._why_changed(args)
        if why is None and len(node.needs_input_grad) != len(args):
            return "forward takes a tensor twice"
        return why

    def _why_changed(self, args: Sequence[Any]) -> str | None:
        name = self.graph.input_name
        gone = [i for i, value in enumerate(args) if value is None and self._found[i] is not None]
        if gone:
            return f"{name(gone[0])} does not exist any more, which forward began with"
        overwritten = self.overwritten()
        if overwritten or self.graph.captured.joint.mutated_inputs:
            written = name(overwritten[0]) if overwritten else "a buffer (running statistics, say)"
            return f"{written} was overwritten in or since forward"
        return None


def _has_memory(tensor: Tensor) -> bool:
    """Does its storage have memory, if it has any bytes?"""
    return not tensor.numel() or all(part.untyped_storage().nbytes() for part in compat.strided_parts(tensor))


def _not_twice(why: str) -> CaptureError:
    return CaptureError(f"a backward through a compiled step can't be differentiated: {why}; {_LEAVE_OUT}")


def _is_root(output: Any, grad: Tensor | None) -> bool:
    return grad is not None and isinstance(output, Tensor) and output.requires_grad


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def undifferentiable(gradients: Sequence[Tensor | None], message: str) -> tuple[Tensor | None, ...]:
    """`gradients` as results of an op whose backward raises CaptureError with `message`."""
    anchor = torch.empty(0, requires_grad=True)
    apply: Any = _Undifferentiable.apply
    refused: tuple[Tensor | None, ...] = apply(message, anchor, *gradients)
    return refused


class _Undifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, _: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CaptureError(ctx.message)
