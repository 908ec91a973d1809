"""A captured training graph as a `Chain`: cut where few bytes cross, each block with its costs of one microbatch.

Which block runs an op of backward is decided as for stages (`fxmem.passes.stage_assign`), every block being a stage.
Masks, tables and views that each stage makes for itself are left out; the stages' real graphs count them later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from fxmem.capture import JointGraph
from fxmem.ir.program import Program
from fxmem.passes.stage_assign import CutError, Staging, assign_stages, num_bytes
from fxmem.pipelining.chain import Block, Chain, Option, lower_hull
from fxmem.planners.chains.graph_blocks import choose_cuts, crossing_bytes
from fxmem.planners.problem import Problem, reduce_program

_NEAR, _WIDE, _USUAL = 4, 3, 1.1
_LEAST_S = 1e-9
"""Seconds of a block in which nothing runs."""


@dataclass(frozen=True)
class ModelChain:
    """`positions[k]`: the op at which block k + 1 begins, so what `Cuts` name."""

    chain: Chain
    positions: tuple[int, ...]

    def cuts(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Positions of cuts that the chain has at `blocks` (0 and the end included)."""
        return tuple(self.positions[block - 1] for block in blocks[1:-1])


def model_chain(
    joint: JointGraph, program: Program, static_bytes: Callable[[str], float], most_blocks: int, least_blocks: int
) -> ModelChain:
    """The chain of `joint`; `program` is its typed view with costs.

    `static_bytes(placeholder)`: what a parameter or buffer takes in all (weights, gradient, optimizer state). Raises
    CutError, saying why, if the graph can't be cut into `least_blocks`.
    """
    problem = reduce_program(program)
    positions = _positions(joint, problem, most_blocks)
    if len(positions) + 1 < least_blocks:
        positions = _positions(joint, problem, max(most_blocks, problem.num_forward))
    staging, positions = _staging(joint, positions, least_blocks)
    return ModelChain(_Costs(staging, problem, static_bytes).chain(), positions)


def _positions(joint: JointGraph, problem: Problem, most_blocks: int) -> tuple[int, ...]:
    """First ops after the narrowest kernels, evenly over the time of forward; wide places are left out.

    A place is wide if there are much narrower ones near it on both sides: what crosses there is about the same, with
    the inner values of a layer on top. If all places as narrow as the usual one (both halves of every layer of a
    transformer) are at most twice `most_blocks`, they are taken instead: even cuts need the smallest pieces there are.
    """
    ops = [i for i, n in enumerate(joint.nodes[: joint.num_forward_nodes]) if n.op == "call_function"]
    kernels, crossing = choose_cuts(problem, problem.num_forward), crossing_bytes(problem)
    width = [int(crossing[kernel]) for kernel in kernels]
    done_s = np.cumsum(problem.seconds[: problem.num_forward])
    best: dict[int, tuple[int, int]] = {}
    places: list[tuple[int, int]] = []
    for k, kernel in enumerate(kernels):
        sides = width[max(0, k - _NEAR) : k], width[k + 1 : k + 1 + _NEAR]
        if not all(side and _WIDE * min(side) <= width[k] for side in sides):
            share = float(done_s[kernel] / done_s[-1]) if done_s[-1] else kernel / problem.num_forward
            part = min(int(share * most_blocks), most_blocks - 1)
            places.append((width[k], kernel))
            best[part] = min(best.get(part, places[-1]), places[-1])
    chosen = list(best.values())
    usual = float(np.median([wide for wide, _ in chosen])) if chosen else 0.0
    narrow = [place for place in places if place[0] <= _USUAL * usual]
    if len(chosen) < len(narrow) <= 2 * most_blocks:
        chosen = narrow
    found = {int(problem.kernel_op[kernel]) + 1 for _, kernel in chosen}
    return tuple(sorted(p for p in found if ops and ops[0] < p <= ops[-1]))


def _staging(joint: JointGraph, positions: tuple[int, ...], least_blocks: int) -> tuple[Staging, tuple[int, ...]]:
    """Blocks between `positions`; those that would tear a buffer apart, or leave a block empty, are joined."""
    reason = "forward has too few places where the values that cross could be sent"
    while len(positions) + 1 >= least_blocks:
        staging = assign_stages(joint, positions, may_share_buffers=True)
        homes = {staging.home[n] for n in staging.forward if n in staging.home and n not in staging.floating}
        bad = {block - 1 for block in range(1, staging.num_stages) if block not in homes}
        for buffer, stages in staging.torn_buffers:
            bad |= set(range(min(stages), max(stages)))
            reason = f"{joint.names.get(buffer.name, buffer.name)} is overwritten in every step and used all over"
        if not bad:
            return staging, positions
        positions = tuple(p for k, p in enumerate(positions) if k not in bad)
    raise CutError(
        f"the model can't be cut into {least_blocks} stages: {reason}; {len(positions) + 1} stages are possible"
    )


class _Costs:
    """Costs of every block."""

    def __init__(self, staging: Staging, problem: Problem, static_bytes: Callable[[str], float]) -> None:
        self.staging, self.problem, self.static_bytes = staging, problem, static_bytes
        self.nodes = staging.joint.nodes
        self.block = np.array([self._block_of(self.nodes[int(op)]) for op in problem.kernel_op], dtype=np.int64)
        self.forward: list[list[int]] = [[] for _ in range(staging.num_stages)]
        self.backward: list[list[int]] = [[] for _ in range(staging.num_stages)]
        for kernel, block in enumerate(self.block):
            if block >= 0:
                (self.forward if kernel < problem.num_forward else self.backward)[block].append(kernel)
        inputs = (n for n in self.nodes if n.op == "placeholder")
        self.num_elements = {n.name: n.meta["val"].numel() for n in inputs if hasattr(n.meta["val"], "numel")}
        self.late = self._weight_kernels()
        self.read_back = np.zeros(problem.num_storages, dtype=bool)
        for kernel in range(problem.num_forward, problem.num_kernels):
            self.read_back[problem.reads(kernel)] = True

    def _block_of(self, node: fx.Node) -> int:
        return -1 if node in self.staging.floating else self.staging.home.get(node, -1)

    def _weight_kernels(self) -> set[int]:
        """Backward kernels that no earlier block waits for."""
        problem = self.problem
        needed = np.zeros(problem.num_storages, dtype=bool)
        late = set()
        first_reader = np.full(problem.num_storages, np.iinfo(np.int64).max)
        for kernel in range(problem.num_forward, problem.num_kernels):
            reads = problem.reads(kernel)
            first_reader[reads] = np.minimum(first_reader[reads], self.block[kernel])
        for kernel in reversed(range(problem.num_forward, problem.num_kernels)):
            writes = problem.writes(kernel)
            if needed[writes].any() or (first_reader[writes] < self.block[kernel]).any():
                needed[problem.reads(kernel)] = True
            else:
                late.add(kernel)
        return late

    def chain(self) -> Chain:
        crossing = self._crossing()
        statics = self._statics()
        blocks = tuple(self._make(k, crossing, statics[k]) for k in range(self.staging.num_stages))
        return Chain(self.problem.program.name, blocks)

    def _crossing(self) -> list[set[int]]:
        """Storages that go from each block to the next."""
        index = {n: i for i, n in enumerate(self.nodes)}
        found: list[set[int]] = [set() for _ in range(self.staging.num_stages)]
        self.sent = [0.0] * self.staging.num_stages
        for node, readers in self.staging.consumers.items():
            if node in self.staging.forward:
                for block in range(self.staging.home[node], max(readers)):
                    found[block].update(self.problem.program.ops[index[node]].storages)
                    self.sent[block] += num_bytes(node)
        return found

    def _statics(self) -> list[list[str]]:
        """Parameters and buffers of every block: what its ops read; unread ones are the first's."""
        names = set(self.staging.joint.static_inputs)
        found: list[set[str]] = [set() for _ in range(self.staging.num_stages)]
        seen: set[str] = set()
        for node in self.nodes:
            block = self._block_of(node)
            if node.op == "call_function" and block >= 0:
                mine = {s.name for s in self.staging.sources(node.all_input_nodes) if s.name in names}
                found[block] |= mine
                seen |= mine
        found[0] |= names - seen
        return [sorted(mine) for mine in found]

    def _make(self, k: int, crossing: Sequence[set[int]], statics: Sequence[str]) -> Block:
        problem, forward, backward = self.problem, self.forward[k], self.backward[k]
        weights = [kernel for kernel in backward if kernel in self.late]
        made = [int(s) for kernel in forward for s in problem.writes(kernel)]
        saved = {s for s in made if self.read_back[s] and s not in crossing[k] and problem.nbytes[s]}
        output = self.sent[k]
        inside = self._peak(forward, saved | crossing[k])
        behind = self._peak(backward, set())
        seconds = [float(problem.seconds[kernels].sum()) for kernels in (forward, backward, weights)]
        return Block(
            name=f"block {k}",
            forward_s=max(seconds[0], _LEAST_S),
            backward_input_s=max(seconds[1] - seconds[2], 0.0),
            backward_weight_s=seconds[2],
            static_bytes=sum(map(self.static_bytes, statics)),
            num_parameters=sum(self.num_elements[name] for name in statics),
            output_bytes=output,
            options=lower_hull(self._options(forward, saved)),
            forward_transient_bytes=max(0.0, inside - output),
            backward_transient_bytes=max(0.0, behind - (self.sent[k - 1] if k else 0.0)),
            weight_saved_bytes=self._held(weights),
        )

    def _options(self, kernels: Sequence[int], saved: set[int]) -> list[Option]:
        """Saved sets that leave out more and more, the cheapest to make again per byte first."""
        problem = self.problem
        total = float(problem.nbytes[sorted(saved)].sum())
        found = [Option(0.0, total)]
        makes = {int(s): kernel for kernel in kernels for s in problem.writes(kernel)}
        fixed = {s for s in saved if not problem.recomputable[makes[s]]}
        density = {s: float(problem.seconds[makes[s]]) / int(problem.nbytes[s]) for s in saved}
        dropped: set[int] = set()
        for storage in sorted(saved - fixed, key=lambda s: (density[s], s)):
            dropped.add(storage)
            again = self._again(kernels, dropped, saved - dropped)
            if again is None:
                dropped.discard(storage)
                continue
            found.append(
                Option(
                    float(problem.seconds[again].sum()),
                    total - float(problem.nbytes[sorted(dropped)].sum()),
                )
            )
        return found

    def _again(self, kernels: Sequence[int], wanted: Iterable[int], kept: set[int]) -> list[int] | None:
        """Kernels of the block to run for `wanted`; None if one of them may run only once."""
        problem, need, again = self.problem, set(wanted), []
        for kernel in reversed(kernels):
            if need.intersection(map(int, problem.writes(kernel))):
                if not problem.recomputable[kernel]:
                    return None
                again.append(kernel)
                need |= set(map(int, problem.reads(kernel))) - kept
        return again

    def _peak(self, kernels: Sequence[int], kept: set[int]) -> float:
        """Most bytes that `kernels` hold of what they make, `kept` staying to the end."""
        problem = self.problem
        last = {int(s): k for k in kernels for s in problem.reads(k)}
        dies: dict[int, int] = {}
        level = peak = 0
        for kernel in kernels:
            for storage in map(int, problem.writes(kernel)):
                level += int(problem.nbytes[storage])
                if storage not in kept:
                    end = last.get(storage, kernel)
                    dies[end] = dies.get(end, 0) + int(problem.nbytes[storage])
            peak = max(peak, level + int(problem.workspace_bytes[kernel]))
            level -= dies.pop(kernel, 0)
        return float(peak)

    def _held(self, weights: Sequence[int]) -> float:
        """Bytes that the weight kernels read and don't make."""
        problem, own = self.problem, {int(s) for k in weights for s in self.problem.writes(k)}
        read = {int(s) for k in weights for s in problem.reads(k)} - own
        return float(problem.nbytes[sorted(read)].sum())
