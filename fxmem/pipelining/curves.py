"""What a stage costs as recomputation is turned up: per-stage curves of (extra seconds, bytes), and a table for all
stages.

Steps down the blocks' lower hulls are taken by extra seconds per byte (ties: earliest block first) and cumulated; the
same is done with the bytes dropped per block capped, because a block that drops much needs much while its backward
restores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fxmem.pipelining.chain import Chain, FloatArray

Recompute = Literal["optimal", "none", "full"]
Span = tuple[int, int]
IntArray = NDArray[np.intp]

_NUM_CAPS = 3
_TABLE_FLOATS = 3_000_000
"""Size of one array of the all-stages table; more states than fit are thinned out evenly."""


@dataclass(frozen=True)
class StageCurve:
    """One or several stages of a device over K states, ordered by extra seconds; arrays have shape [stages, K].

    `levels[k]` gives the option of every block of the spans, in order.
    """

    spans: tuple[Span, ...]
    levels: IntArray
    extra_s: FloatArray
    saved_bytes: FloatArray
    forward_peak_bytes: FloatArray
    backward_peak_bytes: FloatArray


class Curves:
    """Stage curves of a chain under one way of recomputing, made on demand and kept."""

    def __init__(self, chain: Chain, recompute: Recompute = "optimal") -> None:
        self.chain, self.recompute = chain, recompute
        columns = chain.columns
        self.forward_s, self.total_s = columns["forward_s"], columns["total_s"]
        self.output_bytes = columns["output_bytes"]
        width = max(len(block.options) for block in chain.blocks)
        pad = [block.options + (block.options[-1],) * (width - len(block.options)) for block in chain.blocks]
        self.option_bytes = np.array([[option.saved_bytes for option in row] for row in pad])
        self.option_s = np.array([[option.extra_s for option in row] for row in pad])
        self.num_options = np.array([len(block.options) for block in chain.blocks])
        self._made: dict[tuple[tuple[Span, ...], tuple[float, ...]], StageCurve] = {}

    def prefix(self, column: str) -> FloatArray:
        """Prefix sums of a column, shape [L + 1]."""
        return np.concatenate([[0.0], np.cumsum(self.chain.columns[column])])

    @cached_property
    def static_prefix(self) -> FloatArray:
        return self.prefix("static_bytes")

    def of(self, spans: tuple[Span, ...], weights: tuple[float, ...] = ()) -> StageCurve:
        """The joint curve of the stages `spans`; a byte of stage s counts `weights[s]` times (microbatches in
        flight).
        """
        key = (spans, weights if len(spans) > 1 else ())
        if key not in self._made:
            self._made[key] = self._make(spans, key[1] or (1.0,) * len(spans))
        return self._made[key]

    def _make(self, spans: tuple[Span, ...], weights: Sequence[float]) -> StageCurve:
        blocks = np.concatenate([np.arange(i, j) for i, j in spans])
        weight = np.concatenate([np.full(j - i, w) for (i, j), w in zip(spans, weights, strict=True)])
        levels = self.levels(blocks, weight)
        extra = self.option_s[blocks, levels].sum(axis=1)
        return self.at_levels(spans, levels[np.argsort(extra, kind="stable")])

    def at_levels(self, spans: tuple[Span, ...], levels: IntArray) -> StageCurve:
        """The costs of the stages `spans` when their blocks run the options `levels`, shape [K, blocks]."""
        blocks = np.concatenate([np.arange(i, j) for i, j in spans])
        extra, saved = self.option_s[blocks, levels], self.option_bytes[blocks, levels]
        offset, rows = 0, []
        for i, j in spans:
            part = slice(offset, offset + j - i)
            rows.append((extra[:, part].sum(axis=1), *self.stage_bytes(i, j, saved[:, part])))
            offset += j - i
        columns = (np.array(column) for column in zip(*rows, strict=True))
        return StageCurve(spans, levels, *columns)

    def levels(self, blocks: IntArray, weight: FloatArray) -> IntArray:
        """Option of each of `blocks` in every state, shape [K, blocks]."""
        if self.recompute == "none":
            return np.zeros((1, len(blocks)), dtype=np.intp)
        if self.recompute == "full":
            return (self.num_options[blocks] - 1)[None, :].astype(np.intp)
        steps = self._steps(blocks, weight)
        drops = np.unique([dropped for _, _, _, dropped in steps]) if steps else np.array([])
        picks = np.linspace(0, max(len(drops) - 1, 0), _NUM_CAPS + 2).astype(int)[1:-1]
        families = [self._cumulate(steps, len(blocks))]
        for cap in sorted({float(drops[pick]) for pick in picks if pick < len(drops) - 1}):
            families.append(self._cumulate([step for step in steps if step[3] <= cap], len(blocks))[1:])
        return np.concatenate(families)

    def cumulated(self, blocks: IntArray) -> IntArray:
        """The states of all steps in order of their ratio, without the capped ones: points of every stage's lower
        hull.
        """
        return self._cumulate(self._steps(blocks, np.ones(len(blocks))), len(blocks))

    def _steps(self, blocks: IntArray, weight: FloatArray) -> list[tuple[float, int, int, float]]:
        """(seconds per weighted byte, position, option, bytes dropped by then), best first."""
        steps = []
        for position, block in enumerate(blocks):
            seconds, nbytes = self.option_s[block], self.option_bytes[block]
            for option in range(1, int(self.num_options[block])):
                gained = (nbytes[option - 1] - nbytes[option]) * weight[position]
                ratio = (seconds[option] - seconds[option - 1]) / gained
                steps.append((float(ratio), position, option, float(nbytes[0] - nbytes[option])))
        return sorted(steps)

    @staticmethod
    def _cumulate(steps: Sequence[tuple[float, int, int, float]], width: int) -> IntArray:
        moves = np.zeros((len(steps) + 1, width), dtype=np.intp)
        for number, (_, position, _, _) in enumerate(steps):
            moves[number + 1, position] = 1
        return np.cumsum(moves, axis=0)

    def stage_bytes(self, i: int, j: int, saved: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Bytes that stage [i, j) saves, and its transients in forward and backward, for saved bytes [K, j - i]."""
        columns = self.chain.columns
        x = self.output_bytes[i:j]
        inside = np.append(x[:-1], 0.0)
        total = (saved + inside).sum(axis=1)
        before = np.cumsum(saved + x, axis=1) - (saved + x)
        forward = (before + np.maximum(saved, columns["forward_transient_bytes"][i:j]) + x).max(axis=1)
        kept_after = total[:, None] - np.cumsum(saved + inside, axis=1)
        x_in = np.append(self.output_bytes[i - 1] if i else 0.0, x[:-1])
        restored = columns["saved_bytes"][i:j] - saved + columns["backward_transient_bytes"][i:j]
        backward = (restored + x_in - kept_after).max(axis=1)
        return total, forward, backward


class StageTable:
    """For every stage [i, j) and in-flight count: the least extra seconds of recomputation that fits, on thinned
    states.
    """

    def __init__(self, curves: Curves, memory_bytes: float, input_bytes: float) -> None:
        self.curves, self.memory_bytes = curves, memory_bytes
        self.length = len(curves.chain)
        self.input_bytes = input_bytes
        levels = curves.levels(np.arange(self.length), np.ones(self.length))
        limit = max(_TABLE_FLOATS // self.length**2, 16)
        if len(levels) > limit:
            levels = levels[np.unique(np.linspace(0, len(levels) - 1, limit).astype(int))]
        blocks = np.arange(self.length)
        self._saved = curves.option_bytes[blocks, levels]
        self._extra = np.concatenate(
            [np.zeros((len(levels), 1)), np.cumsum(curves.option_s[blocks, levels], axis=1)], axis=1
        )
        self._rows = [self._row(i) for i in range(self.length)]
        self._extra_of: dict[tuple[int, bool], FloatArray] = {}
        self._least_of: dict[tuple[int, bool], FloatArray] = {}

    def _row(self, i: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Extra seconds, bytes per microbatch in flight, bytes once at F and at B for stages [i, j), j > i: [K, L -
        i].
        """
        curves, columns = self.curves, self.curves.chain.columns
        saved, x = self._saved[:, i:], curves.output_bytes[i:]
        x_in = float(curves.output_bytes[i - 1]) if i else 0.0
        sums = np.cumsum(saved + x, axis=1)
        held = sums - x
        tops = sums - saved + np.maximum(saved, columns["forward_transient_bytes"][i:])
        forward = np.maximum.accumulate(tops, axis=1)
        gradient_in = np.append(x_in, x[:-1])
        restored = columns["saved_bytes"][i:] - saved + columns["backward_transient_bytes"][i:] + gradient_in
        earlier = np.maximum.accumulate(restored + sums, axis=1)
        backward = restored.copy()
        backward[:, 1:] = np.maximum(restored[:, 1:], earlier[:, :-1] - held[:, 1:])
        x_out = np.append(x[:-1], 0.0)
        extra = self._extra[:, i + 1 :] - self._extra[:, i : i + 1]
        return extra, held + x_in, forward - held, backward + x_out

    def _needs(self, i: int, in_flight: int, buffered: bool) -> FloatArray:
        """Least bytes of stages [i, j) in every state, shape [K, L - i]."""
        _, per_microbatch, once_forward, once_backward = self._rows[i]
        static = self.curves.static_prefix[i + 1 :] - self.curves.static_prefix[i]
        need = static + in_flight * per_microbatch + np.maximum(once_forward, once_backward)
        x = self.curves.output_bytes
        if buffered:
            need = need + (x[i - 1] if i else 0.0) + np.append(x[i:-1], 0.0)
        return np.asarray(need + (self.input_bytes if i == 0 else 0.0), dtype=float)

    def extra(self, in_flight: int, buffered: bool = False) -> FloatArray:
        """Seconds of recomputation per microbatch, [L, L + 1] indexed [i, j]; infinite where stage [i, j) can't fit."""
        if (in_flight, buffered) not in self._extra_of:
            table = np.full((self.length, self.length + 1), np.inf)
            for i in range(self.length):
                fits = self._needs(i, in_flight, buffered) <= self.memory_bytes
                table[i, i + 1 :] = np.where(fits, self._rows[i][0], np.inf).min(axis=0)
            self._extra_of[in_flight, buffered] = table
        return self._extra_of[in_flight, buffered]

    def least(self, in_flight: int, buffered: bool = False) -> FloatArray:
        """The smallest number of bytes stage [i, j) can run in, [L, L + 1]; infinite where j <= i."""
        if (in_flight, buffered) not in self._least_of:
            table = np.full((self.length, self.length + 1), np.inf)
            for i in range(self.length):
                table[i, i + 1 :] = self._needs(i, in_flight, buffered).min(axis=0)
            self._least_of[in_flight, buffered] = table
        return self._least_of[in_flight, buffered]
