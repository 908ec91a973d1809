"""What stands beside the graphs of one step, as far as it is known without a measurement."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.ir.program import Program
from fxmem.step.call import Call
from fxmem.step.episode import Episode
from fxmem.step.held_tensors import reachable_tensors, storages
from fxmem.step.resident import beside_graph_bytes, gradient_bytes, optimizer_bytes, parameters_of, storage_bytes

_NUM_LEFT = 1024  # tensors of earlier steps that are followed


class Standing:
    """Gradients, optimizer state, the model's tensors and the user's arguments. `gradient_bytes`: the most so far."""

    def __init__(self, functions: Iterable[Callable[..., Any]], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._functions, self._optimizers = functions, optimizers
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self.gradient_bytes = 0
        self.count_optimizers()
        self._left: deque[weakref.ref[Tensor]] = deque(maxlen=_NUM_LEFT)
        self._most_left = 0
        self.notice_parameters()

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for ref in self._parameters if (parameter := ref()) is not None]

    def count_optimizers(self) -> None:
        """The bytes of their states, as they are or will be."""
        self._optimizer_bytes = [optimizer_bytes(optimizer) for optimizer in self._optimizers]

    def notice_parameters(self) -> None:
        """Those of the functions' modules now: more may have come, adapters may have been put on."""
        self._parameters = [weakref.ref(parameter) for parameter in parameters_of(*self._functions)]

    def leave(self, tensors: Iterable[weakref.ref[Tensor]]) -> None:
        """A step has ended: `tensors` are what it was given and what it returned."""
        self._left = deque((ref for ref in (*self._left, *tensors) if ref() is not None), maxlen=_NUM_LEFT)

    @property
    def left(self) -> list[Tensor]:
        """What the caller has kept of earlier steps."""
        return [tensor for ref in self._left if (tensor := ref()) is not None]

    def more_left(self) -> int:
        """By how many bytes it exceeds the most that was seen before."""
        more = max(0, storage_bytes(self.left) - self._most_left)
        self._most_left += more
        return more

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.parameters if p.device.type == "cuda"), torch.device("cpu"))

    def is_of_function(self, args: Sequence[Any]) -> bool:
        """Is a graph that is called with `args` the function's own call? Dynamo shares compiled code between models of
        one class that torch.compile was given with equal options."""
        taken = {id(x) for x in args if isinstance(x, nn.Parameter)}
        return not taken or not taken.isdisjoint(map(id, self.parameters))

    def existing_gradient_bytes(self, args: Sequence[Any]) -> int:
        """Bytes of the gradients that count in a call with `args`."""
        own = self.parameters if self.is_of_function(args) else []
        return gradient_bytes([*own, *(x for x in args if isinstance(x, nn.Parameter))])

    def new_gradient_bytes(self, args: Sequence[Any]) -> int:
        """By how much the gradients, of parameters among `args` too, exceed the most that was seen before."""
        existing = self.existing_gradient_bytes(args)
        more = max(0, existing - self.gradient_bytes)
        self.gradient_bytes += more
        return more

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is it one of those that were named, or a wrapper of one?"""
        return any(optimizer is own or optimizer.state is own.state for own in self._optimizers)

    def missing_optimizer_bytes(self) -> int:
        """Of the named optimizers' state, which counts from the start: what does not exist yet."""
        known = zip(self._optimizers, self._optimizer_bytes, strict=True)
        return sum(nbytes for optimizer, nbytes in known if not optimizer.state)

    def beside_bytes(
        self,
        program: Program,
        is_first_graph: bool,
        in_use: Collection[int],
        user_arguments: Any,
        carried: Sequence[Call],
        episode: Episode | None,
    ) -> int:
        """Bytes that stand beside `program` as it runs now: what it does not take of the model and of the user's call,
        gradients, optimizer state, what earlier calls saved, and what else was made since the step began.

        `in_use`: addresses that the graph is given. `carried`: calls of earlier steps that may still be open.
        """
        beside = self.gradient_bytes + sum(self._optimizer_bytes)
        beside += beside_graph_bytes(self._functions, program, first_graph=is_first_graph)
        beside += sum(call.saved_bytes for call in carried)
        held = storages([*reachable_tensors(user_arguments), *self.left], self.device) if any(in_use) else {}
        counted = {*in_use, *storages((p.grad for p in self.parameters if p.grad is not None), self.device)}
        beside += sum(nbytes for address, nbytes in held.items() if address not in counted)
        if episode is None:
            return beside
        if episode.is_traced:
            return beside + episode.allocated_beside(in_use)
        return beside + sum(call.saved_bytes for call in episode.calls)
