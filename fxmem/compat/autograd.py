"""The autograd engine, its nodes and hooks; autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


def queue_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass that is running on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def keeps_graph() -> bool:
    """Will the backward pass that is running on this thread leave saved tensors for another one?"""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Did anyone register hooks for the gradient of this leaf, to change it or to act when it has been added?"""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def leave_undefined(node: Any) -> None:
    """Let a custom function's node be given None for gradients that don't come, not zeros."""
    node.set_materialize_grads(False)


def zeros_for(node: Any, position: int) -> torch.Tensor:
    """What autograd would make for the gradient of that output of a node."""
    like = node._input_metadata[position]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


InsteadOfBackward = Callable[[Any, Callable[..., Any], list[Any]], Any]
"""(node, compiled backward, gradients of the outputs) -> gradients of the inputs. The list may be emptied."""


def replace_backward(node: Any, instead: InsteadOfBackward) -> None:
    """Let `instead` run for the autograd node of a call of compiled code; `compiled(grads)` is what would have run."""
    node.fxmem_backward = instead
    kind = type(node)._forward_cls
    if hasattr(kind, "fxmem_compiled_backward"):
        return
    kind.fxmem_compiled_backward = kind.backward
    is_boxed = getattr(kind, "boxed_grads_call", False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Any) -> Any:
        run = compiled_backward(ctx)
        found = getattr(ctx, "fxmem_backward", None)
        of_outputs = grads[0] if is_boxed else list(grads)
        del grads
        return run(of_outputs) if found is None else found(ctx, run, of_outputs)

    kind.backward = staticmethod(backward)


def compiled_backward(node: Any) -> Callable[[list[Any]], Any]:
    """What compiled code made for the autograd node of a call of it, whatever runs instead."""
    kind = type(node)._forward_cls
    compiled = getattr(kind, "fxmem_compiled_backward", kind.backward)
    is_boxed = getattr(kind, "boxed_grads_call", False)
    return lambda of_outputs: compiled(node, of_outputs) if is_boxed else compiled(node, *of_outputs)


def give_back_saved(node: Any) -> bool:
    """Let go of the tensors that a custom function's node saved: its own backward can't run any more.

    False, and nothing changes, where somebody's hooks hold them.
    """
    try:
        for saved in node._raw_saved_tensors:
            saved.register_hooks(_pack_nothing, _unpack_nothing)
    except RuntimeError:
        return False
    node._tensors_no_vc_check = []
    return True


def _pack_nothing(_: torch.Tensor) -> None:
    return None


def _unpack_nothing(_: None) -> torch.Tensor:
    raise RuntimeError("what this node saved was given back")


def autocast_now() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Makes a context in which autocast is as it is now."""
    then = autocast_state()

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for (kind, enabled, dtype), now in zip(then, autocast_state(), strict=True):
                if now != (kind, enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield

    return restored


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Of each type of device: is autocast on, and to which dtype?"""
    return tuple((k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in ("cpu", "cuda"))
