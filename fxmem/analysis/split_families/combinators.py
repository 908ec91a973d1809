"""What most rules are made of: `broadcasting`, `aligned`, `mapped` and `labelled`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from fxmem.analysis.split_families.call import Call, Output, Path, Size, Way, Ways, is_open, is_same, open_dims


def broadcasting(call: Call) -> Ways:
    """Results and arguments are broadcast to one shape and have nothing to do with each other along any dim."""
    for dim in open_dims(call.shape):
        found = broadcast_dims(call, call.tensor_names, call.shape, dim)
        if found is not None:
            yield call.way(found, [dim if _has(r, call.shape, dim) else None for r in call.results])


def broadcast_dims(
    call: Call, names: Sequence[str], shape: Sequence[Size], dim: int
) -> dict[str, list[int | None]] | None:
    """For each argument of `names`, the dims of its tensors that are dim `dim` of the common `shape`.

    None for tensors that are broadcast along it. None for all if sizes can't be told to be the same.
    """
    found: dict[str, list[int | None]] = {}
    for name in names:
        found[name] = []
        for tensor in call.tensors_of(name):
            own = -1 if tensor is None else dim - len(shape) + tensor.ndim
            is_split = tensor is not None and own >= 0 and is_open(tensor.shape[own])
            if is_split and not is_same(tensor.shape[own], shape[dim]):  # type: ignore[union-attr]
                return None
            found[name].append(own if is_split else None)
    return found


def aligned(call: Call, excluded: Collection[int] = (), whole: Collection[str] = (), sizes: str = "") -> Ways:
    """Every tensor but those of `whole` has the dims of the results and is split like them, not along `excluded`.

    `sizes`: the argument that holds the result's shape.
    """
    names = [name for name in call.tensor_names if name not in whole]
    tensors = [t for name in names for t in call.tensors_of(name) if t is not None]
    for dim in open_dims(call.shape):
        if dim not in excluded and all(_has(t, call.shape, dim) for t in (*tensors, *call.results)):
            yield call.way(dict.fromkeys(names, dim), dim, [(sizes, dim)] if sizes else ())


def _has(tensor: Tensor, shape: Sequence[Size], dim: int) -> bool:
    return tensor.ndim == len(shape) and is_same(tensor.shape[dim], shape[dim])


def mapped(call: Call, dims: Mapping[int, Output], name: str = "self", sizes: str = "") -> Ways:
    """One tensor argument, `name`, each dim of which becomes the one that `dims` says of all results (or a sum).

    `sizes`: the argument that holds the result's shape.
    """
    shape = call.shape_of(name)
    for dim, output in dims.items():
        if is_open(shape[dim]):
            yield call.way({name: dim}, output, [(sizes, output)] if sizes and isinstance(output, int) else ())


def labelled(
    call: Call,
    inputs: Mapping[str, str],
    outputs: Sequence[str | None],
    sizes: Mapping[str, Sequence[Path]] | None = None,
) -> Ways:
    """A letter for each leading dim of arguments and results, '.' for one that can't be split.

    Along a letter, the arguments that have it are split, unless they are broadcast (size 1) or left out (None, empty).
    A result that lacks the letter is contracted over it: the parts' results are to be added up. None for one that no
    part can make. There is no way where a result has the letter with a size of 1: it is the gradient of what was
    broadcast, or something else unheard of. `sizes`: by letter, where its size stands among the arguments.
    """
    tensors = {name: tensor for name in inputs if (tensor := call.tensor(name)) is not None}
    for letter in sorted({*"".join(inputs.values())} - {"."}):
        found = {name: dim for name, t in tensors.items() if (dim := _open_dim(t, inputs[name], letter)) is not None}
        lengths = [tensors[name].shape[dim] for name, dim in found.items()]
        if lengths and all(is_same(length, lengths[0]) for length in lengths):
            yield _labelled_way(call, found, outputs, letter, (sizes or {}).get(letter, ()))


def _open_dim(tensor: Tensor, letters: str, letter: str) -> int | None:
    dim = letters.find(letter)
    return dim if 0 <= dim < tensor.ndim and is_open(tensor.shape[dim]) else None


def _labelled_way(
    call: Call, found: Mapping[str, int], outputs: Sequence[str | None], letter: str, sizes: Sequence[Path]
) -> Way | None:
    results = [None if text is None else _output(text, letter) for text in outputs]
    is_sum_unsaid = any(
        isinstance(dim, int) and isinstance(tensor, Tensor) and is_same(tensor.shape[dim], 1)
        for dim, tensor in zip(results, call.results, strict=True)
    )
    return None if is_sum_unsaid else call.way(found, results, sizes)


def _output(text: str, letter: str) -> Output:
    return text.index(letter) if letter in text else "sum"


def letters(ndim: int) -> str:
    """A letter for each of `ndim` dims."""
    return "abcdefghijklmnopqrstuvwxyz"[:ndim]


def after_removing(dim: int, ndim: int) -> Iterator[tuple[int, int]]:
    """(dim before, dim after) for all dims but `dim`, which is taken out."""
    return ((d, d - (d > dim)) for d in range(ndim) if d != dim)
