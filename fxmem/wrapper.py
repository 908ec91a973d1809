"""What `compile` returns: the model itself, or a function, whose training step runs under a budget."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fxmem.budget import Budget
from fxmem.capture.loss import with_loss
from fxmem.capture.outputs import with_outputs
from fxmem.options import Settings
from fxmem.planners.plan import Plan
from fxmem.step.backend import step_of_torch_compile
from fxmem.step.compiled import Step
from fxmem.step.member import Member

_OF_STEP = ("plan", "plans", "num_retries", "set_budget")


class Planned:
    """The step of one wrapper, made when first asked for: a copy or a loaded pickle may never train.

    `function`: what the user gave. `forward`: what was put in the place of the wrapper's forward, if anything was.
    """

    def __init__(self, function: Callable[..., Any], made: Settings) -> None:
        self.function = function
        self.made = made
        self.forward: Callable[..., Any] | None = None
        self._source: Callable[..., Any] | None = None
        self._member: Member | None = None

    @property
    def step(self) -> Step:
        return self._current().step

    @property
    def settings(self) -> Settings:
        """The options now in force."""
        return self.made if self._member is None else replace(self.made, budget=self._member.step.settings.budget)

    @torch.compiler.disable(reason="a planned step is compiled already")  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._current()(*args, **kwargs)

    def _current(self) -> Member:
        """What a call runs now: of a module its forward, which may be replaced on the instance."""
        source = self.function.forward if isinstance(self.function, nn.Module) else self.function
        if self._member is None or source != self._source:
            called = source if self.made.loss_fn is None else with_loss(self.function, self.made.loss_fn)
            called = with_outputs(called, self.made.outputs)
            self._member, self._source = Member(called, self.settings), source
        return self._member

    def copied(self, function: Callable[..., Any], memo: dict[int, Any]) -> Planned:
        """For a copy of `function`: nothing of it may lead to the original's weights or gradients."""
        made = self.settings
        if made.optimizer is not None:  # counted by size only: a copy of its state would be bytes for nothing
            memo[id(made.optimizer.state)] = defaultdict(dict)
        loss_fn, optimizer = copy.deepcopy((made.loss_fn, made.optimizer), memo)
        return Planned(function, replace(made, loss_fn=loss_fn, optimizer=optimizer))


class CompiledModule(nn.Module):
    """`model`, its training step run under a budget: an object of the model's own class that shares its attributes.

    Whatever is read, set, registered or replaced on one is on both: parameters, submodules, hooks, `training`, config.
    Only `forward` differs: here it is the planned step. `plans`: one per captured graph; `plan`: the one with the
    highest peak; `set_budget(budget)` plans again at the next call, without Dynamo (OptionError); `num_retries`: how
    often the step was planned again because a measurement was over the budget; `step`: the state of all that. An
    attribute of the model by one of these names is the model's here, too: `fxmem.step_of` then reaches the step.
    """

    _fxmem: Planned
    if TYPE_CHECKING:
        plan: Plan
        plans: list[Plan]
        num_retries: int
        step: Step

        def set_budget(self, budget: Budget) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._fxmem.made.loss_fn is not None:  # the model's hooks see the model's output, within the step
            return self.forward(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "step":
                return self._fxmem.step
            if name in _OF_STEP:
                return getattr(self._fxmem.step, name)
            raise

    def __copy__(self) -> CompiledModule:
        return around(Planned(copy.copy(self._fxmem.function), self._fxmem.settings))

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        own = self._fxmem
        made = memo[id(self)] = around(own.copied(copy.deepcopy(own.function, memo), memo))
        made._fxmem.forward = copy.deepcopy(own.forward, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _loaded, (CompiledModule, self._fxmem.function, self._fxmem.settings)


class CompiledFunction:
    """A callable, its training step run under a budget. `plan`, `plans`, `step` as for a module."""

    def __init__(self, planned: Planned) -> None:
        functools.update_wrapper(self, planned.function)
        self._fxmem = planned

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._fxmem(*args, **kwargs)

    def set_budget(self, budget: Budget) -> None:
        """Plan again, for another budget, at the next call; Dynamo does not run again. Raises OptionError."""
        self.step.set_budget(budget)

    @property
    def step(self) -> Step:
        return self._fxmem.step

    @property
    def plan(self) -> Plan:
        return self.step.plan

    @property
    def plans(self) -> list[Plan]:
        return self.step.plans

    @property
    def num_retries(self) -> int:
        """How often the step was planned again because a measurement was over the budget."""
        return self.step.num_retries

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledFunction:
        own = self._fxmem
        return CompiledFunction(own.copied(copy.deepcopy(own.function, memo), memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _loaded, (CompiledFunction, self._fxmem.function, self._fxmem.settings)


def wrap(function: Callable[..., Any], made: Settings) -> CompiledModule | CompiledFunction:
    """`function` compiled; of something compiled already, what is behind it. Raises OptionError."""
    if isinstance(function, (CompiledModule, CompiledFunction)):
        function = function._fxmem.function
    planned = Planned(function, made)
    planned.step  # noqa: B018 - options that only a step can check are refused now
    if not isinstance(function, nn.Module):
        return CompiledFunction(planned)
    taken = [name for name in (*_OF_STEP, "step") if name in dir(function)]
    if taken:
        message = f"the model has attributes of its own called {', '.join(taken)}, and they stay its own"
        warnings.warn(f"{message}: fxmem.step_of(compiled) has the step's", stacklevel=3)
    return around(planned)


def around(planned: Planned) -> CompiledModule:
    """An object of the model's class (and CompiledModule) with the model's own `__dict__`."""
    model = planned.function
    made: CompiledModule = object.__new__(_class_for(type(model), planned.made.loss_fn is not None))
    object.__setattr__(made, "__dict__", model.__dict__)
    object.__setattr__(made, "_fxmem", planned)
    object.__setattr__(made, "_compiled_call_impl", None)
    return made


def _loaded(kind: type, function: Callable[..., Any], made: Settings) -> CompiledModule | CompiledFunction:
    planned = Planned(function, made)
    return CompiledFunction(planned) if kind is CompiledFunction else around(planned)


class _Forward:
    """`forward` of a compiled model: the planned step, unless something was put in its place.

    A data descriptor, since a `forward` in the `__dict__` that the model shares (a patched one) would hide a method.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, instance: CompiledModule | None, owner: type) -> Callable[..., Any]:
        if instance is None:
            return self.function
        return instance._fxmem.forward or types.MethodType(self.function, instance)

    def __set__(self, instance: CompiledModule, value: Callable[..., Any]) -> None:
        instance._fxmem.forward = value

    def __delete__(self, instance: CompiledModule) -> None:
        instance._fxmem.forward = None


_classes: weakref.WeakValueDictionary[tuple[type, bool], type] = weakref.WeakValueDictionary()


def _class_for(model_class: type, has_loss: bool) -> type:
    """A subclass of the model's class with its names, which libraries go by, and a planned `forward`.

    What is the wrapper's alone lies in slots, beside the `__dict__` that it shares.
    """
    found = _classes.get((model_class, has_loss))
    if found is None:
        names = {name: getattr(model_class, name) for name in ("__module__", "__qualname__", "__doc__")}
        forward = _Forward(_forward_of(model_class, has_loss))
        body = {**names, "__slots__": ("_fxmem", "_compiled_call_impl"), "forward": forward}
        bases = (CompiledModule, model_class)
        found = types.new_class(model_class.__name__, bases, exec_body=lambda namespace: namespace.update(body))
        _classes[model_class, has_loss] = found
    return found


def _forward_of(model_class: Any, has_loss: bool) -> Callable[..., Any]:
    """The planned step with the signature of the model's forward (a step with a loss takes the target, too).

    Not by functools.wraps: whoever unwraps forward must not get at the unplanned one.
    """

    def forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
        return self._fxmem(*args, **kwargs)

    if not has_loss:
        with contextlib.suppress(TypeError, ValueError):
            forward.__signature__ = inspect.signature(model_class.forward)  # type: ignore[attr-defined]
        forward.__doc__ = model_class.forward.__doc__
    return forward


def step_of(model: Callable[..., Any]) -> Step:
    """The step behind a model or function: its `plan`, `plans`, `set_budget`, `num_retries`, `measured_peak_bytes`.

    `model`: what `fxmem.compile` returned, what `torch.compile(..., backend="fxmem")` returned, or a model after
    `model.compile(backend="fxmem")`. Raises LookupError if it is none of these, or Dynamo captured nothing of it yet.
    """
    if isinstance(model, (CompiledModule, CompiledFunction)):
        return model._fxmem.step
    step = step_of_torch_compile(model)
    if step is None:
        raise LookupError("not compiled by fxmem, or no graph of it captured yet: a step begins with its first call")
    return step
