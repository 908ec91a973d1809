"""A rank's memory, foretold: its actions, sends and receives in order over the bytes that the stages' modules hold.

The modules played are the ones that run. Tensors are told apart by the identity of their fake storages; what is held
between actions is counted by reference, as Python does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import fx

from fxmem import compat
from fxmem.capture.notes import notes
from fxmem.ir.program import Program
from fxmem.passes.split_backward import PART
from fxmem.runtime.pipeline.arrivals import Arrivals, Message, Row
from fxmem.runtime.pipeline.code import StageCode
from fxmem.runtime.pipeline.params import can_keep
from fxmem.runtime.pipeline.sink import deliver, storage_keys
from fxmem.runtime.transfers import ops as _ops  # noqa: F401  (defines fxmem::offload and the others)
from fxmem.units import align_up

_HANDLES = (torch.ops.fxmem.offload.default, torch.ops.fxmem.free.default)
"""Their results are a few bytes of the interpreter's, and not the device's."""

Held: TypeAlias = tuple[int, int, int]
"""(stage, microbatch, storage)."""


class StageBytes:
    """What the modules of one stage hold. `program`: of the stage, with workspaces; `rounding`: of sizes, in bytes.
    `part_workspace`: of a node that is a part of one of the program's ops; None where it isn't known.
    """

    def __init__(
        self,
        code: StageCode,
        program: Program,
        rounding: int = 1,
        part_workspace: Callable[[fx.Node], int | None] = lambda _: None,
    ) -> None:
        self.code, self.graph = code, code.graph
        self._rounding, self._part_workspace = rounding, part_workspace
        self._ops = {op.name: op for op in program.ops}
        self._nbytes, self._program = program.nbytes(), program
        self.sizes: dict[int, int] = {}
        self._peaks: dict[tuple[str, frozenset[int], frozenset[int]], int] = {}
        for kind in ("F", "B"):
            for node in code.module(kind).graph.nodes:
                self._note_size(node)
        graph, nodes = self.graph, {n.name: n for n in self.graph.joint.nodes}
        self._given = {key for name in (*graph.statics, *graph.data) for key in storage_keys(nodes[name])}

    @cached_property
    def receives(self) -> list[int]:
        return self._inputs("F", self.graph.receives)

    @cached_property
    def grad_receives(self) -> list[int]:
        return self._inputs("B", self.graph.grad_receives or self.graph.joint.tangents)

    def _inputs(self, kind: str, names: Sequence[str]) -> list[int]:
        nodes = {n.name: n for n in self.code.module(kind).graph.find_nodes(op="placeholder")}
        return [self._key(nodes[name].meta["val"]) for name in names]

    @cached_property
    def saved(self) -> list[int]:
        """Storages that wait for backward, in order; parameters and data are not among them."""
        results = self.code.module("F").graph.output_node().args[0]
        nodes = [n for n in results[self.code.num_results :] if isinstance(n, fx.Node)]  # type: ignore[index, union-attr]
        return [key for n in nodes for key in storage_keys(n) if key not in self._given]

    def outputs(self, kind: str) -> list[tuple[int, int]]:
        """(storage, bytes of the copy that a message needs: 0 if it takes the tensor as it is) of what goes to the next
        stage ("F") or the one before ("B", "I").
        """
        module = self.code.module(kind)
        count = self.code.num_results if kind == "F" else len(self.graph.grad_sends)
        nodes = list(module.graph.output_node().args[0])[:count]  # type: ignore[arg-type]
        return [(self._key(n.meta["val"]), self._copied_bytes(n.meta["val"])) for n in nodes]

    def _copied_bytes(self, value: torch.Tensor) -> int:
        return 0 if _is_dense(value) else self._rounded(int(value.nbytes))

    @cached_property
    def kept(self) -> list[int]:
        """Storages between the input part of backward and its weight part."""
        nodes = self.code.module("W").graph.find_nodes(op="placeholder")
        for node in nodes:
            self._note_size(node)
        return [key for n in nodes for key in storage_keys(n) if key not in self._given]

    @cached_property
    def loss_bytes(self) -> int:
        results: Any = self.code.module("F").graph.output_node().args[0]
        return self._rounded(int(results[0].meta["val"].nbytes))

    def peak(self, kind: str, owned: Iterable[int], fresh: Mapping[int, int]) -> int:
        """Bytes above those standing at the start of a run of module `kind`, at most.

        `owned`: storages that die at their last use. `fresh`: positions of gradients that become the parameter's own,
        with the parameter's bytes.
        """
        key = (kind, frozenset(owned), frozenset(fresh))
        if key not in self._peaks:
            self._peaks[key] = self._play(kind, key[1], fresh)
        return self._peaks[key]

    def _play(self, kind: str, owned: frozenset[int], fresh: Mapping[int, int]) -> int:
        nodes = [n for n in self.code.module(kind).graph.nodes if n.op != "output"]
        born, last = self._spans(nodes)
        end = len(nodes)
        change = np.zeros(end + 2, dtype=np.int64)
        workspace = np.array([self._workspace(n) for n in nodes] or [0], dtype=np.int64)
        for index, node in enumerate(nodes):
            if node.target is deliver and node.args[1] in fresh:
                nbytes, gradient = fresh[node.args[1]], node.args[2]
                if node.args[3] and self.keeps(node):
                    last[storage_keys(gradient)[0]] = end
                else:
                    change[index] += nbytes
        for key, first in born.items():
            if first >= 0:
                change[first] += self.sizes[key]
            if first >= 0 or key in owned:
                change[last[key] + 1] -= self.sizes[key]
        return int((np.cumsum(change)[: max(end, 1)] + workspace).max())

    def _spans(self, nodes: Sequence[fx.Node]) -> tuple[dict[int, int], dict[int, int]]:
        """For every storage: the node that makes it (-1: given), and the one after which no name is left for it."""
        position = {n: i for i, n in enumerate(nodes)}
        born: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, node in enumerate(nodes):
            self._note_size(node)
            use = max((position.get(user, len(nodes)) for user in node.users), default=index)
            if node.op == "placeholder" and not node.users:
                use = len(nodes)
            for key in storage_keys(node):
                born.setdefault(key, -1 if node.op in ("placeholder", "get_attr") else index)
                last[key] = max(last.get(key, -1), use)
        return born, last

    def keeps(self, node: fx.Node) -> bool:
        """Does the gradient that this node delivers become the parameter's?"""
        parameter = self.graph.values([self.graph.gradients[node.args[1]]])[0]  # type: ignore[index]
        return can_keep(node.args[2].meta["val"], parameter)  # type: ignore[union-attr]

    def _op(self, node: fx.Node) -> Any:
        note = notes(node)
        return self._ops.get(note.get("recompute_of") or note.get("derived_from") or node.name)

    def _workspace(self, node: fx.Node) -> int:
        op = self._op(node) if node.op == "call_function" else None
        known = self._part_workspace(node) if notes(node).get(PART) else None
        if known is not None:
            return known
        return op.workspace_bytes if op is not None else 0

    def _key(self, value: torch.Tensor) -> int:
        key = compat.storage_key(value)
        self.sizes.setdefault(key, self._rounded(int(compat.storage_nbytes(value))))
        return key

    def _note_size(self, node: fx.Node) -> None:
        """Note the sizes of the storages of `node`: what the program says, which may know the allocator's truth."""
        keys = list(dict.fromkeys(storage_keys(node)))
        if node.target in _HANDLES:
            self.sizes |= dict.fromkeys(keys, 0)
        op = self._op(node)
        made = self._program.allocates(op) if op is not None else ()
        new = [key for key in keys if key not in self.sizes]
        if len(made) == len(new):
            self.sizes.update(zip(new, (self._nbytes[s] for s in made), strict=True))
        for leaf in compat.tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor):
                self._key(leaf)

    def _rounded(self, nbytes: int) -> int:
        return align_up(nbytes, self._rounding)


def _is_dense(value: torch.Tensor) -> bool:
    """Does a message take the tensor as it is?"""
    order = sorted(range(value.dim()), key=lambda d: (value.stride(d), value.size(d)), reverse=True)
    return value.permute(order).is_contiguous()


@dataclass(frozen=True)
class RankBytes:
    """What stands on a rank beside what its actions move. `fixed_bytes`: parameters, buffers, optimizer state,
    gradients that exist, the batch. `parameter_bytes`: by canonical name. `with_gradient`: names that have one.
    `shared`: names that several ranks hold, and those ranks.
    """

    fixed_bytes: int
    parameter_bytes: Mapping[str, int]
    with_gradient: frozenset[str]
    shared: Mapping[str, tuple[int, ...]]


class Moment(NamedTuple):
    """One action of a rank: `peak_bytes` stand at most while it runs, `level_bytes` after it."""

    stage: int
    kind: str
    microbatch: int
    peak_bytes: int
    level_bytes: int


class RankPlay:
    """Plays one rank's row of actions. `peak_bytes`: the most that stands at once; `moments`: at each action."""

    def __init__(
        self,
        rank: int,
        rows: Sequence[Row],
        rank_of: Sequence[int],
        stages: Mapping[int, StageBytes],
        canonical: Callable[[StageBytes, str], str],
        beside: RankBytes,
    ) -> None:
        self.rank, self.rank_of, self.stages, self.canonical, self.beside = rank, rank_of, stages, canonical, beside
        self.level = self.peak_bytes = self._peak_since = beside.fixed_bytes
        self.moments = [Moment(-1, "start", -1, self.level, self.level)]
        self.held: Counter[Held] = Counter()
        self.posted: dict[Message, tuple[list[Held], int]] = {}
        self.has_gradient = set(beside.with_gradient) - set(beside.shared)
        self.arrivals = Arrivals(rows)
        self._run(rows[rank])

    def _run(self, row: Row) -> None:
        for stage, kind, chunk in row:
            if kind == "RECV_F":
                self._hold(stage, chunk, self.stages[stage].receives)
            elif kind == "RECV_B":
                self._hold(stage, chunk, self.stages[stage].grad_receives)
            elif kind in ("SEND_F", "SEND_B"):
                self._send(stage, kind[-1], chunk)
            elif kind == "F":
                self._forward(stage, chunk)
            elif kind in ("B", "I"):
                self._backward(stage, kind, chunk)
            elif kind == "W":
                self._weights(stage, chunk)
            self._stands(0)
            self.moments.append(Moment(stage, kind, chunk, self._peak_since, self.level))
            self._peak_since = self.level
        for message in list(self.posted):
            self._arrived(message)
        sums = [n for n, ranks in self.beside.shared.items() if ranks[0] == self.rank and n in self.has_gradient]
        self._stands(max((self.beside.parameter_bytes[n] for n in sums), default=0))

    def _stands(self, more: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.level + more)
        self._peak_since = max(self._peak_since, self.level + more)

    def _name(self, stage: int, chunk: int, key: int) -> Held:
        """A message within the rank is the same tensor in both stages, if its layout is right."""
        at = self.stages[stage]
        for other, kind, received in ((stage - 1, "F", at.receives), (stage + 1, "B", at.grad_receives)):
            if self._is_here(other) and key in received:
                source, copied_bytes = self.stages[other].outputs(kind)[received.index(key)]
                return (stage, chunk, key) if copied_bytes else self._name(other, chunk, source)
        return stage, chunk, key

    def _is_here(self, stage: int) -> bool:
        return 0 <= stage < len(self.rank_of) and self.rank_of[stage] == self.rank

    def _nbytes(self, name: Held) -> int:
        return self.stages[name[0]].sizes[name[2]]

    def _hold(self, stage: int, chunk: int, keys: Iterable[int]) -> None:
        for key in keys:
            name = self._name(stage, chunk, key)
            if not self.held[name]:
                self.level += self._nbytes(name)
            self.held[name] += 1

    def _drop(self, stage: int, chunk: int, keys: Iterable[int]) -> None:
        for key in keys:
            name = self._name(stage, chunk, key)
            self.held[name] -= 1
            if not self.held[name]:
                del self.held[name]
                self.level -= self._nbytes(name)

    def _release(self) -> None:
        for message in [m for m in self.posted if self.arrivals.has_arrived(m)]:
            self._arrived(message)

    def _arrived(self, message: Message) -> None:
        names, copied = self.posted.pop(message)
        _, stage, chunk = message
        self._drop(stage, chunk, [key for _, _, key in names])
        self.level -= copied

    def _send(self, stage: int, kind: str, chunk: int) -> None:
        outputs = self.stages[stage].outputs(kind)
        copied = sum(nbytes for _, nbytes in outputs)
        self.level += copied
        self._stands(0)
        self._drop(stage, chunk, [key for key, nbytes in outputs if nbytes])
        self.posted[kind, stage, chunk] = [(stage, chunk, key) for key, nbytes in outputs if not nbytes], copied

    def _sole(self, stage: int, chunk: int, keys: Sequence[int]) -> list[int]:
        """Those of `keys` that nobody else holds, all of their references being among `keys`."""
        counts = Counter(self._name(stage, chunk, key) for key in keys)
        return [key for key in keys if counts[name := self._name(stage, chunk, key)] == self.held[name]]

    def _forward(self, stage: int, chunk: int) -> None:
        at = self.stages[stage]
        if stage:
            self.arrivals.use("F", stage, chunk)
            self._release()
        self._stands(at.peak("F", self._sole(stage, chunk, at.receives), {}))
        self._hold(stage, chunk, at.saved)
        outputs = [] if at.graph.is_last else [key for key, _ in at.outputs("F")]
        self._hold(stage, chunk, outputs)
        self._drop(stage, chunk, at.receives if stage else [])
        if at.graph.is_last:
            self.level += at.loss_bytes
        elif self._is_here(stage + 1):
            self._hand_over(stage, chunk, outputs, stage + 1, self.stages[stage + 1].receives)

    def _hand_over(self, stage: int, chunk: int, outputs: Sequence[int], other: int, received: Sequence[int]) -> None:
        """A message within the rank: copied where its layout is not what `other` expects."""
        self._hold(other, chunk, received)
        self._stands(0)
        self._drop(stage, chunk, outputs)

    def _backward(self, stage: int, kind: str, chunk: int) -> None:
        at = self.stages[stage]
        if at.graph.is_last:
            self._hold(stage, chunk, at.grad_receives)  # the loss's own gradient
        else:
            self.arrivals.use("B", stage, chunk)
            self._release()
        given = [*at.saved, *at.grad_receives]
        kept = at.kept if kind == "I" else []
        owned = [key for key in self._sole(stage, chunk, given) if key not in kept]
        self._gradients(stage, kind, owned)
        self._hold(stage, chunk, kept)
        outputs = [key for key, _ in at.outputs(kind)] if stage else []
        self._hold(stage, chunk, outputs)
        self._drop(stage, chunk, given)
        if self._is_here(stage - 1):
            self._hand_over(stage, chunk, outputs, stage - 1, self.stages[stage - 1].grad_receives)

    def _weights(self, stage: int, chunk: int) -> None:
        kept = self.stages[stage].kept
        self._gradients(stage, "W", self._sole(stage, chunk, kept))
        self._drop(stage, chunk, kept)

    def _gradients(self, stage: int, kind: str, owned: Sequence[int]) -> None:
        """Run a part of backward: gradients of parameters that have none yet stay."""
        at, fresh, nbytes = self.stages[stage], dict[int, int](), self.beside.parameter_bytes
        for node in at.code.module(kind).graph.find_nodes(op="call_function", target=deliver):
            name = self.canonical(at, at.graph.gradients[node.args[1]])
            if name not in self.has_gradient:
                self.has_gradient.add(name)
                fresh[node.args[1]] = nbytes[name]
        self._stands(at.peak(kind, owned, fresh))
        self.level += sum(fresh.values())
