"""Last refinements of a candidate's recomputation, block by block, on the real stage peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fxmem.pipelining.chain import FloatArray
from fxmem.pipelining.curves import IntArray
from fxmem.pipelining.evaluate import Candidate, DeviceCurve, Evaluator

_MAX_TRIES = 80


def polish(evaluator: Evaluator, candidate: Candidate) -> Candidate:
    """Rebuild each device's recomputation greedily by what its peak gains, then give back options while the simulation
    fits.
    """
    best = candidate
    for _ in range(3):
        rebuilt = _rebuilt(evaluator, best)
        if rebuilt is None or rebuilt.step_s >= best.step_s * (1 - 1e-9):
            break
        best = rebuilt
    return _restored(evaluator, best)


@dataclass
class _Room:
    """A device's blocks, their present options, and how far the simulated peak stands above the curve's bytes."""

    device: DeviceCurve
    blocks: IntArray
    excess_bytes: float


def _rooms(evaluator: Evaluator, candidate: Candidate) -> list[_Room]:
    rooms = []
    for device, peak in zip(evaluator.devices(candidate.cuts, candidate.maker), candidate.peak_bytes, strict=True):
        blocks = np.concatenate([np.arange(i, j) for i, j in device.curve.spans])
        levels = np.asarray(candidate.levels, dtype=np.intp)[blocks]
        rooms.append(_Room(device, blocks, peak - float(_need(evaluator, device, candidate, levels[None, :])[0])))
    return rooms


def _need(evaluator: Evaluator, device: DeviceCurve, candidate: Candidate, levels: IntArray) -> FloatArray:
    curve = evaluator.curves.at_levels(device.curve.spans, levels)
    number = candidate.maker.device_of[device.stages[0]]
    return evaluator.need(curve, candidate.maker.occupancy()[number], candidate.maker.num_microbatches)


def _rebuilt(evaluator: Evaluator, candidate: Candidate) -> Candidate | None:
    rooms = _rooms(evaluator, candidate)
    for _ in range(4):
        levels = np.asarray(candidate.levels, dtype=np.intp)
        for room in rooms:
            greedy = _greedy(evaluator, candidate, room)
            if greedy is not None and _extra(evaluator, room, greedy) < _extra(evaluator, room, levels[room.blocks]):
                levels[room.blocks] = greedy
        found = evaluator.simulate_levels(candidate.cuts, candidate.maker, tuple(levels.tolist()))
        if found is None:
            return None
        over = [peak - evaluator.cluster.memory_bytes for peak in found.peak_bytes]
        if max(over) <= 0:
            return found
        for room, above in zip(rooms, over, strict=True):
            room.excess_bytes += max(above, 0.0)
    return None


def _extra(evaluator: Evaluator, room: _Room, levels: IntArray) -> float:
    return float(evaluator.curves.option_s[room.blocks, levels].sum())


def _greedy(evaluator: Evaluator, candidate: Candidate, room: _Room) -> IntArray | None:
    """From nothing recomputed, the step of least seconds per byte of the device's peak until it fits; None if it never
    does.
    """
    curves, limit = evaluator.curves, evaluator.cluster.memory_bytes - room.excess_bytes
    levels = np.zeros(len(room.blocks), dtype=np.intp)
    need = float(_need(evaluator, room.device, candidate, levels[None, :])[0])
    for _ in range(int(curves.num_options[room.blocks].sum())):
        if need <= limit:
            return levels
        open_blocks = np.flatnonzero(levels + 1 < curves.num_options[room.blocks])
        if not len(open_blocks):
            return None
        tries = np.repeat(levels[None, :], len(open_blocks), axis=0)
        tries[np.arange(len(open_blocks)), open_blocks] += 1
        needs = _need(evaluator, room.device, candidate, tries)
        at = room.blocks[open_blocks]
        seconds = curves.option_s[at, levels[open_blocks] + 1] - curves.option_s[at, levels[open_blocks]]
        saved = curves.option_bytes[at, levels[open_blocks]] - curves.option_bytes[at, levels[open_blocks] + 1]
        gains = need - needs
        gains = np.minimum(gains, need - limit) if (gains > 0).any() else saved
        with np.errstate(divide="ignore"):
            pick = int(np.where(gains > 0, seconds / gains, np.inf).argmin())
        levels, need = tries[pick], float(needs[pick])
    return levels if need <= limit else None


def _restored(evaluator: Evaluator, candidate: Candidate) -> Candidate:
    """Lower single options, dearest first, while the curve's bytes and then the simulation fit."""
    best, tries = candidate, 0
    rooms = _rooms(evaluator, candidate)
    for room in rooms:
        levels = np.asarray(best.levels, dtype=np.intp)
        order = np.argsort(-evaluator.curves.option_s[room.blocks, levels[room.blocks]], kind="stable")
        for position in order:
            block = int(room.blocks[position])
            for level in range(int(levels[block])):
                lower = levels.copy()
                lower[block] = level
                need = float(_need(evaluator, room.device, best, lower[room.blocks][None, :])[0])
                if need + room.excess_bytes > evaluator.cluster.memory_bytes or tries >= _MAX_TRIES:
                    continue
                tries += 1
                found = evaluator.simulate_levels(best.cuts, best.maker, tuple(lower.tolist()))
                if found and found.step_s <= best.step_s and max(found.peak_bytes) <= evaluator.cluster.memory_bytes:
                    best, levels = found, lower
                    break
    return best
