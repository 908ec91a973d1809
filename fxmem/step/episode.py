"""What a step really runs: which graphs are called, what of them stands, when their backwards run, and how many bytes.

An *episode* begins with a forward when no earlier one waits for its backward, or after a backward has run, and ends
when none of its forwards can be read by a backward any more. A call stands until its backward has run for good
(without `retain_graph`) or its outputs are gone.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.errors import CaptureError
from fxmem.planners.plan import Plan
from fxmem.step.arguments import Arguments, undifferentiable
from fxmem.step.call import Call, Key, Output, compiled_nodes
from fxmem.step.held_tensors import storages
from fxmem.step.joined import Segment
from fxmem.step.levels import Level, levels_of
from fxmem.step.measurement import MemoryTrace, mark

_SMALL_BYTES = 4096  # so much may be left of each step, and is not followed


@dataclass(frozen=True)
class Measured:
    """Bytes of a step: at its peak, and by segment."""

    peak_bytes: int
    levels: Mapping[Segment, Level]


class Episode:
    """The calls of one step. `on_end()` is told when the last of them is done; it may run inside a finalizer."""

    def __init__(self, owner: int, on_end: Callable[[], None]) -> None:
        self.owner, self._on_end = owner, on_end
        self.calls: list[Call] = []
        self.backward_order: list[int] = []
        self.has_compiled = self.has_ended = self.has_warned = False
        self.is_torn = False  # part of it ran where it could not be measured
        self.gradient_bytes = 0
        self.left: list[weakref.ref[Tensor]] = []  # what the caller may keep of it
        self.trace: MemoryTrace | None = None
        self.is_whole = False  # measured from the start of the user's call
        self.start_bytes = 0
        self._known: set[int] = set()  # addresses counted in `start_bytes`
        self._late: dict[int, int] = {}  # address -> bytes of arguments that were not
        self._recent: list[Call] = []  # whose backward is running
        self.is_queued = False
        self._thread = threading.get_ident()

    # measuring

    def start_trace(
        self, tensors: Sequence[Tensor], device: torch.device, is_whole: bool, hidden_bytes: int = 0
    ) -> None:
        """`hidden_bytes`: that stand on `device` beside `tensors`."""
        held = storages(tensors, device)
        trace = MemoryTrace(device, watched=tensors, owner=self.owner)
        if trace.begin():
            self.trace, self.is_whole = trace, is_whole
            self.start_bytes, self._known = sum(held.values()) + hidden_bytes, set(held)

    @property
    def is_traced(self) -> bool:
        return self.trace is not None and self.trace.is_running

    def allocated_beside(self, arguments: Iterable[int]) -> int:
        """Bytes allocated since the start that stand now, without `arguments` (addresses)."""
        if self.trace is None or not self.is_traced:
            return 0
        level, live = self.trace.level()
        return max(0, level - sum(live.get(address, 0) for address in arguments))

    def tangent_bytes(self, arguments: Set[int]) -> int:
        """Of gradients that come for calls while others' backwards run: none for one whose results another call takes,
        or the one that is to come, with `arguments` (addresses)."""
        taken = {origin.call for call in self.calls for origin in call.origins if isinstance(origin, Output)}
        free = (call for call in self.calls if call.is_open and call.number not in taken)
        return sum(
            call.gradient_bytes[0] for call in free if arguments.isdisjoint(out[0] for out in call.outputs if out)
        )

    def origins(self, arguments: Sequence[tuple[int, int]]) -> tuple[Any, ...]:
        """Where a call's arguments, (address, bytes) each, come from.

        What neither the start nor an allocation since accounts for stood before, though nothing that was known held it.
        """
        assert self.trace is not None
        live = self.trace.level()[1]
        made = {
            output[0]: Output(call.number, i)
            for call in self.calls
            for i, output in enumerate(call.outputs)
            if output is not None and output[1]() is not None
        }
        self._late.update((a, n) for a, n in arguments if a and a not in self._known and a not in live)
        return tuple(
            ("argument", i) if not a else made.get(a) if a in live else ("held", a)
            for i, (a, _) in enumerate(arguments)
        )

    # calls

    @property
    def is_here(self) -> bool:
        """Does it run on this thread?"""
        return threading.get_ident() == self._thread

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls if call.is_open]

    @property
    def plans(self) -> list[Plan]:
        """What its calls run by."""
        return [plan for call in self.calls if (plan := call.variant.plan) is not None]

    @property
    def prefix(self) -> tuple[Key, ...]:
        return tuple(call.key for call in self.calls)

    def run(self, call: Call, args: Sequence[Any]) -> Any:
        """The forward of `call`."""
        self.calls.append(call)
        call.arguments = Arguments(
            call.graph, args, call.variant.rereads, copies=self.is_traced, is_held=call.is_first
        )
        mark(self.owner, f"F+ {call.number}")
        try:
            outputs = call.variant.code(*args)
        except BaseException:
            mark(self.owner, "0")
            raise
        mark(self.owner, f"F- {call.number}")
        call.arguments.forward_ended(args)
        self.notice(outputs)
        self.notice(x for x in args if isinstance(x, Tensor) and x.requires_grad)
        self._watch(call, outputs)
        return outputs

    def notice(self, tensors: Iterable[Any]) -> None:
        """The caller has `tensors`: those that are no parameters, and not tiny, may stand when the next step begins."""
        found = (t for t in tensors if isinstance(t, Tensor) and not isinstance(t, nn.Parameter))
        self.left += [weakref.ref(t) for t in found if sum(storages([t], t.device).values()) > _SMALL_BYTES]

    def _watch(self, call: Call, outputs: Iterable[Any]) -> None:
        tensors = [t for t in outputs if isinstance(t, Tensor)]
        if self.is_traced:
            call.outputs = [
                (t.untyped_storage().data_ptr(), weakref.ref(t)) if isinstance(t, Tensor) else None for t in outputs
            ]
        roots = [t for t in tensors if t.requires_grad]
        if not roots:  # nothing that it returned can be differentiated: it may be a view of an input, say
            _dropped(weakref.ref(self), call)
            return
        hook = _BackwardHook(self, call)
        weakref.finalize(hook, _dropped, weakref.ref(self), call).atexit = False
        for root in roots:
            root.register_hook(hook)
        is_plain = not any(compat.is_wrapper_subclass(t) or t.is_nested for t in tensors)
        nodes = list(compiled_nodes(roots))
        call.node = weakref.ref(nodes[0]) if is_plain and len(nodes) == 1 else None
        for node in nodes:
            if is_plain:
                compat.leave_undefined(node)
            compat.replace_backward(node, _Backward(self, call, hook))
            if self.is_traced:
                node.register_hook(_EndMark(self.owner, call.number))

    def backward_starts(self, call: Call) -> None:
        """Gradients of `call`'s outputs have come: its backward is about to run.

        One that is to be differentiated itself is like more of forward.
        """
        if torch.is_grad_enabled():
            return
        self._queue()
        if self.trace is not None and self.trace.device.type == "cpu" and not self.is_here:
            self.is_torn = True
        for later in self.calls[self.calls.index(call) + 1 :]:
            if call.is_first:  # and planned without what later calls saved
                later.give_back(self.owner, later.variant)
        if call not in self._recent:
            self._recent.append(call)
            self.backward_order.append(call.number)
            mark(self.owner, f"B+ {call.number}")
            if not compat.keeps_graph():
                call.drop()

    def second_backward_starts(self, call: Call) -> None:
        """What a backward of `call` returned is differentiated: by no compiled code, so it is no segment of its own."""
        if torch.is_grad_enabled():
            return
        self._queue()
        if not compat.keeps_graph():
            call.drop()

    def _queue(self) -> None:
        """Hear of the end of the backward pass that is running."""
        if self.is_queued:
            return
        self.is_queued = True
        compat.queue_after_backward(_WhenDropped(self))
        for other in self.calls:
            other.dropped = frozenset(
                i for i, output in enumerate(other.outputs) if output is not None and output[1]() is None
            )

    def backward_ended(self) -> None:
        """The thread's backward has returned, or failed."""
        mark(self.owner, "0")
        self._recent.clear()
        self.is_queued = False
        self.end_if_done()

    def end_if_done(self) -> None:
        """End when no backward can come; on another thread (a collector's) that is left to the next step."""
        if not self.open_calls and not self.is_queued and self.is_here:
            self.end()

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            if self.trace is not None:
                self.trace.end()
            for call in self.calls:
                if call.arguments is not None and not call.is_open:
                    call.arguments.drop()
            self._on_end()

    def abandon(self) -> None:
        """A call failed: what was measured means nothing."""
        if self.trace is not None:
            self.trace.abandon()
        self.trace = None

    @property
    def measured(self) -> Measured | None:
        """None if it was not measured as a whole: a backward failed, or ran on another thread."""
        trace = self.trace
        if trace is None or trace.is_running or trace.peak_delta_bytes is None:
            return None
        keys = [point.key for point in trace.marks]
        has_failed = any(key.startswith("B+") and after == "0" for key, after in itertools.pairwise(keys))
        if self.is_torn or has_failed:
            return None
        base = self.start_bytes + sum(self._late.values())
        levels = {segment: level.over(base) for segment, level in levels_of(trace.marks).items()}
        return Measured(base + trace.peak_delta_bytes, levels)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dropped(episode: weakref.ref[Episode], call: Call) -> None:
    call.drop()
    if call.arguments is not None:
        call.arguments.drop()
    found = episode()
    if found is not None:
        found.end_if_done()


class _BackwardHook:
    """Lives as long as the autograd graph of the outputs it is registered on."""

    def __init__(self, episode: Episode, call: Call) -> None:
        self.episode, self.call = episode, call

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, grad: Tensor) -> None:
        self.episode.backward_starts(self.call)


class _Backward:
    """Runs instead of the compiled backward of a call where that can't do what is asked: see `arguments`."""

    def __init__(self, episode: Episode, call: Call, hook: _BackwardHook) -> None:
        self.episode, self.call, self.hook = episode, call, hook

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, node: Any, compiled: Callable[[list[Any]], Any], grads: list[Any]) -> Any:
        arguments = self.call.arguments
        assert arguments is not None
        try:
            return self._run(arguments, node, compiled if self.call.again is None else self._again, grads)
        finally:
            if not self.call.is_open:
                arguments.drop()

    def _run(self, arguments: Arguments, node: Any, compiled: Callable[[list[Any]], Any], grads: list[Any]) -> Any:
        left_out = self.call.variant.undefined
        undefined = frozenset(i for i, gradient in enumerate(grads) if gradient is None)
        if not left_out <= undefined:
            return self._of_all(arguments, node, grads, left_out - undefined)
        for i in undefined - left_out:
            grads[i] = compat.zeros_for(node, i)
        if torch.is_grad_enabled():
            return self._differentiable(arguments, node, compiled, grads)
        before = self.call.undefined
        self.call.undefined = undefined if before is None else undefined & before
        overwritten = [i for i in arguments.overwritten() if i in arguments.reread] if arguments.reread else []
        if not overwritten:
            gradients = compiled(grads)
            self.episode.notice(arguments.of_inputs(gradients))
            return gradients
        self.call.graph.pin(overwritten)
        self.episode.is_torn = True  # no measurement can be ended here, and this plan will not run again
        with arguments.as_before(overwritten):
            return compiled(grads)

    def _again(self, grads: list[Any]) -> Any:
        """For a call that gave back what it saved."""
        compiled = self.call.backward_again()
        mark(self.episode.owner, f"R= {self.call.number}")
        return compiled(grads)

    def _differentiable(
        self, arguments: Arguments, node: Any, compiled: Callable[[list[Any]], Any], grads: list[Any]
    ) -> Any:
        found = arguments.differentiable(node, grads)
        if isinstance(found, CaptureError):
            with torch.no_grad():
                gradients = compiled(grads)
            return undifferentiable(gradients, str(found))
        self.call.is_differentiated = True
        for gradient in found:
            if gradient is not None and gradient.requires_grad:
                gradient.register_hook(self._differentiated)
        return tuple(found)

    def _of_all(self, arguments: Arguments, node: Any, grads: list[Any], asked: Set[int]) -> Any:
        """Gradients came of outputs that had none before: the model's own code runs again, this once."""
        self.call.graph.asked |= asked
        self.episode.is_torn = True
        with torch.enable_grad():
            found = arguments.differentiable(node, grads)
        if isinstance(found, CaptureError):
            raise CaptureError(f"a gradient came of an output that had none in the steps before; try again: {found}")
        if torch.is_grad_enabled():
            return tuple(found)
        return tuple(None if gradient is None else gradient.detach() for gradient in found)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _differentiated(self, _: Tensor) -> None:
        """Keeps `hook`, and so the call open, while there may be a backward of its gradients."""
        self.episode.second_backward_starts(self.call)


class _EndMark:
    """Registered on the autograd node of a call: its backward has run."""

    def __init__(self, owner: int, number: int) -> None:
        self.owner, self.number = owner, number

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        mark(self.owner, f"B- {self.number}")


class _WhenDropped:
    """Tells of the end of a backward pass when autograd drops it, which is after the thread's own state is back.

    Within the callback the profiler can't be stopped for good: autograd puts the thread's state back afterwards.
    """

    def __init__(self, episode: Episode) -> None:
        self.episode = episode

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self) -> None:
        """Nothing to do yet."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __del__(self) -> None:
        self.episode.backward_ended()
