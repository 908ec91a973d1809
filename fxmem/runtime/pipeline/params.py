"""The parameters and buffers of one rank: only those its stages use, under the model's own names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxmem import compat
from fxmem.errors import OptionError

Init: TypeAlias = Callable[[str, Tensor], None]
"""Fills a new parameter or buffer, given its name in the model; a name must give the same values on all ranks."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, buffers and attributes that are tensors, under every name."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for path, module in model.named_modules(remove_duplicate=False):
        plain = {name: value for name, value in module.__dict__.items() if isinstance(value, Tensor)}
        named |= {f"{path}.{name}" if path else name: value for name, value in plain.items()}
    return named


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of `model` whose tensors are on the meta device; ties between parameters are kept.

    Attributes that are tensors become buffers that no state dict holds.
    """
    memo: dict[int, object] = {}
    for tensor in tensors_of(model).values():
        meta = torch.empty_like(tensor, device="meta", requires_grad=False)
        memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    skeleton = copy.deepcopy(model, memo)
    for module in skeleton.modules():
        for name in [name for name, value in module.__dict__.items() if isinstance(value, Tensor)]:
            module.register_buffer(name, module.__dict__.pop(name), persistent=False)
    return skeleton


class Names:
    """Every name of a model's parameters and buffers; those that are one tensor share one canonical name."""

    def __init__(self, skeleton: nn.Module) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.canonical: dict[str, str] = {}
        first: dict[int, str] = {}
        named = (
            *skeleton.named_parameters(remove_duplicate=False),
            *skeleton.named_buffers(remove_duplicate=False),
        )
        for name, tensor in named:
            self.canonical[name] = first.setdefault(id(tensor), name)
            self.tensors.setdefault(self.canonical[name], tensor)
        self.transient = {
            f"{path}.{name}" if path else name
            for path, module in skeleton.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }

    def aliases(self, canonical: str) -> list[str]:
        return [name for name, other in self.canonical.items() if other == canonical]

    def is_parameter(self, canonical: str) -> bool:
        return isinstance(self.tensors[canonical], nn.Parameter)


class Parameters:
    """Tensors of one rank by canonical name, with their gradients of the running step.

    `shared`: names held by several ranks -> those ranks, lowest first; their gradients are summed by `reduce_shared`.
    """

    def __init__(self, names: Names, device: torch.device, shared: Mapping[str, tuple[int, ...]]) -> None:
        self.names, self.device, self.shared = names, device, shared
        self.tensors: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    def load(self, wanted: Iterable[str], source: nn.Module | Mapping[str, Tensor] | None, init: Init | None) -> None:
        """Materialise the tensors named (canonically) in `wanted`.

        From `source`, a module or a mapping by name (a tensor of the right device is shared, not copied); what it lacks
        or has on the meta device is made by `init`. Raises OptionError naming what neither of them has.
        """
        given = _by_name(source)
        for name in sorted(set(wanted) - self.tensors.keys()):
            found = next((given[alias] for alias in self.names.aliases(name) if alias in given), None)
            like = self.names.tensors[name]
            if found is not None and not found.is_meta:
                tensor = found if found.device == self.device else found.detach().to(self.device)
            elif init is not None:
                tensor = torch.empty_like(like, device=self.device)
                with torch.no_grad():
                    init(name, tensor)
            else:
                raise OptionError(f"{name} has no value: give a state dict that holds it, or init")
            if self.names.is_parameter(name) and not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor.detach(), like.requires_grad)
            self.tensors[name] = tensor

    def module(self, wanted: Iterable[str]) -> nn.Module:
        """A module tree that holds `wanted` under all of their names in the model."""
        root = nn.Module()
        for name in wanted:
            for alias in self.names.aliases(name):
                path, _, leaf = alias.rpartition(".")
                owner = _submodule(root, path)
                if self.names.is_parameter(name):
                    owner.register_parameter(leaf, self.tensors[name])  # type: ignore[arg-type]
                else:
                    owner.register_buffer(leaf, self.tensors[name], persistent=alias not in self.names.transient)
        return root

    def accumulate(self, name: str, gradient: Tensor, is_own: bool = True) -> None:
        """Add `gradient` to the parameter's; of a shared one only after `reduce_shared`.

        `is_own`: nothing else lives in its storage, so that it may become the gradient itself.
        """
        if name not in self.shared:
            _add_gradient(self.tensors[name], gradient, is_own)
        elif name in self._pending:
            self._pending[name].add_(gradient)
        else:
            self._pending[name] = _owned(gradient, self.tensors[name], is_own)

    def reduce_shared(self, rank: int, group: dist.ProcessGroup | None) -> None:
        """Sum the gradients of shared parameters over the ranks that hold them: to the lowest one and back."""
        for name, ranks in sorted(self.shared.items()):
            if rank not in ranks or name not in self.tensors:
                continue
            total = self._pending.pop(name, None)
            if total is None:
                total = torch.zeros_like(self.tensors[name], requires_grad=False)
            if rank == ranks[0]:
                for other in ranks[1:]:
                    part = torch.empty_like(total)
                    dist.recv(part, group_src=other, group=group)
                    total.add_(part)
                for other in ranks[1:]:
                    dist.send(total, group_dst=other, group=group)
            else:
                dist.send(total, group_dst=ranks[0], group=group)
                dist.recv(total, group_src=ranks[0], group=group)
            _add_gradient(self.tensors[name], total)

    def verify_hooks(self, several: Iterable[str]) -> None:
        """Raises OptionError for a parameter with hooks whose gradient of one microbatch is never there as a whole.

        `several`: names of those that get it in several terms on this rank.
        """
        for name in {*self.shared, *several} & self.tensors.keys():
            if compat.has_gradient_hooks(self.tensors[name]):
                raise OptionError(
                    f"{name} has hooks on its gradient, but is used in several stages, none of which has all of its "
                    "gradient: change p.grad after the step instead, or cut so that one stage has all of its uses"
                )

    def forget_step(self) -> None:
        """Drop what a failed step left behind."""
        self._pending.clear()


_WRAPPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


def verify_plain(model: nn.Module) -> None:
    """Raises OptionError for a model wrapped for data parallelism, whose hooks on forward and backward never run here,
    or with parameters that are no plain tensors."""
    for name, module in model.named_modules():
        wrappers = _WRAPPERS & {kind.__name__ for kind in type(module).__mro__}
        own = [p for p in module._parameters.values() if p is not None]
        kinds = wrappers | {type(p).__name__ for p in own if compat.is_wrapper_subclass(p)}
        if kinds:
            raise OptionError(
                f"{name or 'the model'} is a {type(module).__name__} ({', '.join(sorted(kinds))}): stages run captured "
                "graphs, in which it does nothing. Give the model itself to fxmem.pipeline; after every step "
                "all_reduce the gradients over the ranks that hold the same stage"
            )


def _by_name(source: nn.Module | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if source is None:
        return {}
    if isinstance(source, nn.Module):
        return tensors_of(source)
    return dict(source)


def _submodule(root: nn.Module, path: str) -> nn.Module:
    for step in path.split(".") if path else ():
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root._modules[step]  # type: ignore[assignment]
    return root


def _add_gradient(parameter: Tensor, gradient: Tensor, is_own: bool = True) -> None:
    if compat.has_gradient_hooks(parameter):
        parameter.backward(gradient)  # what runs them where a model runs under autograd
    elif parameter.grad is None:
        parameter.grad = _owned(gradient, parameter, is_own)
    else:
        parameter.grad.add_(gradient)


def _owned(gradient: Tensor, parameter: Tensor, is_own: bool) -> Tensor:
    """A gradient laid out like its parameter and in a storage of its own."""
    if is_own and can_keep(gradient, parameter):
        return gradient.detach()
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def can_keep(gradient: Tensor, parameter: Tensor) -> bool:
    """Is `gradient` laid out like `parameter` in a storage of just its size?"""
    is_whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
    return gradient.stride() == parameter.stride() and gradient.dtype == parameter.dtype and is_whole
