"""Proven lower bounds on the step time of a chain over P devices, whatever the cuts, the recomputation and the order.

For contiguous stages with whole backwards, stage [i, j) of device s works in a window that starts after the forwards
and ends before the backwards of the stages before it. In that window fit m times its work, and the bytes it holds,
integrated over time, fit the device: each microbatch holds its saved bytes for at least the work of the later stages
plus its own.
"""

from __future__ import annotations

import numpy as np

from fxmem.pipelining.chain import Chain, Cluster, FloatArray
from fxmem.pipelining.curves import Curves, IntArray, Recompute


def lower_bound_s(
    chain: Chain,
    cluster: Cluster,
    num_microbatches: int,
    *,
    recompute: Recompute = "optimal",
    split: bool = False,
    interleaved: bool = False,
) -> float:
    """Seconds that no step can beat; infinite if no contiguous cut fits.

    `split` allows dI/dW splitting, `interleaved` several stages per device, wherever they are (and any split).
    """
    if interleaved:
        return _anywhere_s(chain, cluster, num_microbatches, Curves(chain, recompute)) * (1 - 1e-9)
    bound = _Bound(chain, cluster, num_microbatches, recompute, split)
    best = np.full(len(chain) + 1, np.inf)
    best[0] = 0.0
    for stage in range(cluster.num_devices):
        best = np.minimum.reduce(np.maximum(best[:-1, None], bound.stage(stage)), axis=0)
    return float(best[-1]) * (1 - 1e-9)


def _anywhere_s(chain: Chain, cluster: Cluster, num: int, curves: Curves) -> float:
    """The bound with stages anywhere: all devices' work, all devices' bytes over time, one microbatch's path.

    What a block saves, and its input, stand from the end of its forward to the end of its input gradient: through the
    work of all later blocks. Fractions of options at most make that cheaper, so the blocks' steps are taken in order of
    seconds per byte and second held.
    """
    columns, blocks = chain.columns, np.arange(len(chain))
    passing = columns["forward_s"] + columns["backward_input_s"]
    held_s = passing.sum() - np.cumsum(passing) + columns["backward_input_s"]
    x_in = np.concatenate([[0.0], curves.output_bytes[:-1]])
    levels = curves.levels(blocks, np.maximum(held_s, 1e-30))[: len(curves.cumulated(blocks))]
    saved, extra = curves.option_bytes[blocks, levels], curves.option_s[blocks, levels].sum(axis=1)
    room = cluster.num_devices * cluster.memory_bytes - columns["static_bytes"].sum() - num * chain.input_bytes
    if room <= 0:
        return float("inf")
    path = float(columns["forward_s"].sum() + columns["backward_input_s"].sum())
    work = num * (columns["total_s"].sum() + extra) / cluster.num_devices
    area = num * ((saved + x_in) * held_s).sum(axis=1) / room
    return max(path, float(_least_of_both(work, area)))


class _Bound:
    """The bound of every stage [i, j), per device."""

    def __init__(
        self, chain: Chain, cluster: Cluster, num_microbatches: int, recompute: Recompute, split: bool
    ) -> None:
        self.chain, self.cluster, self.num, self.split = chain, cluster, num_microbatches, split
        self.curves = Curves(chain, recompute)
        self.levels = _hull_states(self.curves)
        blocks = np.arange(len(chain))
        self.saved = self.curves.option_bytes[blocks, self.levels]
        self.extra = self.curves.option_s[blocks, self.levels]
        self.sums = {name: self.curves.prefix(name) for name in chain.columns}
        self.x = np.concatenate([[0.0], self.curves.output_bytes[:-1], [0.0]])
        links = [
            [cluster.between(s, s + 1).seconds(b) + cluster.between(s + 1, s).seconds(b) for b in self.x[1:-1]]
            for s in range(cluster.num_devices - 1)
        ]
        self.link_s = np.array(links).reshape(cluster.num_devices - 1, len(chain) - 1)
        self.least_link_s = self.link_s.min(axis=1, initial=np.inf) if len(chain) > 1 else np.zeros(len(links))

    def stage(self, stage: int) -> FloatArray:
        """Bound of stages [i, j) on device `stage`, shape [L, L + 1]."""
        length, last = len(self.chain), self.cluster.num_devices - 1
        table = np.full((length, length + 1), np.inf)
        for i in range(length if stage else 1):
            if (stage > 0) == (i > 0):
                table[i, i + 1 :] = self._row(stage, i)
        if stage < last:
            table[:, length] = np.inf
        else:
            table[:, :length] = np.inf
        return table

    def _row(self, stage: int, i: int) -> FloatArray:
        """Bounds for j = i + 1 .. L."""
        sums, columns, last = self.sums, self.chain.columns, self.cluster.num_devices - 1
        passing = "backward_input_s"
        weight = sums["backward_weight_s"]
        j = np.arange(i + 1, len(self.chain) + 1)
        links_before = float(
            self.least_link_s[: max(stage - 1, 0)].sum() + (self.link_s[stage - 1, i - 1] if stage else 0.0)
        )
        links_behind = np.zeros(len(j))
        if stage < last:
            links_behind = self.least_link_s[stage + 1 :].sum() + np.append(self.link_s[stage, i:], 0.0)
        forward = sums["forward_s"][j] - sums["forward_s"][i]
        inward = sums[passing][j] - sums[passing][i]
        weights = weight[j] - weight[i]
        lead_forward, lead_back = float(sums["forward_s"][i]), float(sums[passing][i])
        behind = sums["forward_s"][-1] - sums["forward_s"][j] + sums[passing][-1] - sums[passing][j] + links_behind
        if not self.split:
            lead_back += float(weight[i])
            inward, behind = inward + weights, behind + weight[-1] - weight[j]
        room = self.cluster.memory_bytes - (sums["static_bytes"][j] - sums["static_bytes"][i])
        room -= self.chain.input_bytes * self.num if i == 0 else 0.0
        x_in, x_out = self.x[i], self.x[j]
        gradient_in = np.append(x_in, self.curves.output_bytes[i:-1])
        running = inward * (x_out + columns["backward_transient_bytes"][i:] + gradient_in) + forward * x_out
        extra = np.cumsum(self.extra[:, i:], axis=1)
        kept = (
            np.cumsum(self.saved[:, i:], axis=1)
            + np.concatenate([[0.0], np.cumsum(self.curves.output_bytes[i:-1])])
            + x_in
        )
        area = self.num * (kept * (behind + forward + inward) + running)
        with np.errstate(divide="ignore", invalid="ignore"):
            held = np.where(room > 0, area / room, np.inf)
        lead = lead_forward + lead_back + links_before
        if self.split:
            work = np.maximum(
                lead_forward + self.num * (forward + inward + weights + extra),
                lead + self.num * (forward + inward + extra),
            )
            held = held + lead_forward
        else:
            work, held = lead + self.num * (forward + inward + extra), held + lead
        return _least_of_both(work, held)


def _least_of_both(rising: FloatArray, falling: FloatArray) -> FloatArray:
    """A lower bound of min over r of max(rising, falling) between and at the sampled states (axis 0)."""
    between = np.maximum(rising, np.concatenate([falling[1:], falling[-1:]]))
    return np.asarray(between.min(axis=0), dtype=float)


def _hull_states(curves: Curves) -> IntArray:
    """States on the lower hull of (extra seconds, saved bytes) of every stage at once: all steps in order of their
    ratio.
    """
    blocks = np.arange(len(curves.chain))
    if curves.recompute != "optimal":
        return curves.levels(blocks, np.ones(len(blocks)))
    states = curves.cumulated(blocks)
    limit = max(2_000_000 // len(blocks) ** 2, 16)
    if len(states) > limit:
        states = states[np.unique(np.linspace(0, len(states) - 1, limit).astype(int))]
    return states
