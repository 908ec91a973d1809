"""Which storages stand on the device while each action runs, and who they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from fxmem.ir.program import Program
from fxmem.schedule.actions import Action, Compute, Recompute, StartBackward
from fxmem.schedule.simulate import SimResult, simulate, without_unread_states

Kind = Literal["parameter", "input", "saved", "gradient", "output", "temporary", "workspace", "resident"]


@dataclass(frozen=True, slots=True)
class Holder:
    """Bytes that stand at one step. `storage` is None for what no storage owns (a workspace, the optimizer's state)."""

    storage: int | None
    name: str
    nbytes: int
    kind: Kind
    source: str = ""


@dataclass(frozen=True)
class Liveness:
    """Residencies of `actions` on `program`, both ends inclusive, as the simulator has them (bytes at the hints)."""

    program: Program
    actions: tuple[Action, ...]
    result: SimResult

    def live_at(self, step: int) -> tuple[int, ...]:
        """Storages on the device while action `step` runs, inputs included, in id order.

        One is listed twice while two copies of it stand: a returned value and the same recomputed.
        """
        moving = [storage for storage, first, last in self.result.lifetimes if first <= step <= last]
        return tuple(sorted([*moving, *self.program.resident]))

    @cached_property
    def saved(self) -> frozenset[int]:
        """Storages that stand on both sides of the start of backward without being inputs: the saved tensors."""
        start = next((i for i, a in enumerate(self.actions) if isinstance(a, StartBackward)), len(self.actions))
        return frozenset(s for s, first, last in self.result.lifetimes if first < start < last)

    def holders(self, step: int) -> tuple[Holder, ...]:
        """What stands while action `step` runs, largest first; their bytes add up to the simulator's."""
        found = [self._holder(storage) for storage in self.live_at(step)]
        action = self.actions[step] if step < len(self.actions) else None
        if isinstance(action, (Compute, Recompute)):
            op = self.program.ops[action.op]
            found.append(Holder(None, f"workspace of {op.name}", op.workspace_bytes, "workspace", op.source))
        extra_bytes = self.program.extra_resident_bytes
        found.append(Holder(None, "gradients and optimizer state", extra_bytes, "resident"))
        return tuple(sorted((h for h in found if h.nbytes), key=lambda h: (-h.nbytes, h.name)))

    def _holder(self, storage: int) -> Holder:
        op = self.program.ops[self.program.producer[storage]]
        return Holder(storage, op.shown, self._nbytes[storage], self._kind(storage), op.source)

    def _kind(self, storage: int) -> Kind:
        op = self.program.ops[self.program.producer[storage]]
        if storage in self.program.resident:
            return "parameter" if op.index in self.program.static else "input"
        if storage in self._gradients:
            return "gradient"
        if storage in self._outputs:
            return "output"
        return "saved" if storage in self.saved else "temporary"

    @cached_property
    def _nbytes(self) -> list[int]:
        return self.program.nbytes()

    @cached_property
    def _gradients(self) -> frozenset[int]:
        return frozenset(s for o in self.program.backward_outputs for s in self.program.ops[o].storages)

    @cached_property
    def _outputs(self) -> frozenset[int]:
        return frozenset(s for o in self.program.forward_outputs for s in self.program.ops[o].storages)


def plain_actions(program: Program) -> tuple[Action, ...]:
    """Every op once, in program order: the step without a plan."""
    scheduled = [op for op in program.ops if not program.is_folded(op) and not (op.is_input and op.region == "forward")]
    forward = [Compute(op.index) for op in scheduled if op.region == "forward"]
    backward = [Compute(op.index) for op in scheduled if op.region == "backward"]
    return without_unread_states(program, (*forward, StartBackward(), *backward))


def liveness(program: Program, actions: Sequence[Action] | None = None) -> Liveness:
    """Liveness of `actions` (default: everything saved). Raises VerifyError when they are no valid schedule."""
    chosen = plain_actions(program) if actions is None else tuple(actions)
    return Liveness(program, chosen, simulate(program, chosen))
