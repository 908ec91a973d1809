"""The storages behind tensors, and their version counters."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxmem.compat.fake_tensors import no_modes


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of the storage that `tensor` is a view of (if sparse: its values); valid while that storage lives."""
    return int(strided_parts(tensor)[-1].untyped_storage()._cdata)


def storage_nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the storage that `tensor` is a view of; all bytes of a sparse tensor."""
    nbytes: int | torch.SymInt = sum(part.untyped_storage().nbytes() for part in strided_parts(tensor))
    return nbytes


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that hold the bytes of `tensor`: itself, or the indices and values of a sparse one (values last)."""
    layout = tensor.layout
    if layout == torch.strided:
        return (tensor,)
    with no_modes():  # of a real tensor, while another one is traced, too
        if layout == torch.sparse_coo:
            return tensor._indices(), tensor._values()
        if layout in (torch.sparse_csr, torch.sparse_bsr):
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        if layout in (torch.sparse_csc, torch.sparse_bsc):
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Is it a subclass that holds other tensors (DTensor and the like)?"""
    return bool(is_traceable_wrapper_subclass(tensor))


def version(tensor: torch.Tensor) -> int:
    """How often `tensor`, or what it shares memory with, was written to in place; an inference tensor has no count."""
    return -1 if tensor.is_inference() else tensor._version


def write_back(tensor: torch.Tensor, value: torch.Tensor, version: int) -> None:
    """Give `tensor` the bytes and the version counter that it once had: autograd sees no change."""
    tensor.detach().data.copy_(value)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
