"""Schedule actions: a `Plan` is a list of these over the ops and storages of one `Program`.

Only ops that own bytes or have effects appear (`Program.is_folded` ones are re-derived just in time). A value dies
after its last read before it is created again, so nothing is said to drop it; `Free` marks only where the compute
stream waits for a device-to-host copy and gives the bytes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from fxmem.errors import VerifyError

Tier = Literal["host", "disk"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True)
class Compute:
    """Run op `op` for the first time."""

    op: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run op `op` again (rematerialization): later reads see the new storages."""

    op: int


@dataclass(frozen=True, slots=True)
class StartBackward:
    """The boundary: forward's results are returned here, and what is read later are the saved tensors."""


@dataclass(frozen=True, slots=True)
class Offload:
    """Start copying `storage` to `tier`; the copy waits for what the compute stream has issued so far."""

    storage: int
    tier: Tier = "host"


@dataclass(frozen=True, slots=True)
class Free:
    """Compute waits for the pending offload of `storage`, then its device bytes are given back."""

    storage: int


@dataclass(frozen=True, slots=True)
class Reload:
    """Take device bytes for `storage` and start copying it back; the copy waits for compute at this point."""

    storage: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute waits for the pending reload of `storage`: from here on it can be read."""

    storage: int


Action = Compute | Recompute | StartBackward | Offload | Free | Reload | Wait
_ACTIONS: dict[str, Any] = {cls.__name__: cls for cls in get_args(Action)}


def action_to_json(action: Action) -> list[Any]:
    """[class name, *fields]."""
    return [type(action).__name__, *(getattr(action, name) for name in action.__slots__)]


def action_from_json(data: list[Any]) -> Action:
    """Inverse of `action_to_json`. Raises VerifyError for an unknown action."""
    name, *fields = data
    if name not in _ACTIONS or len(fields) not in {len(_ACTIONS[name].__slots__)}:
        raise VerifyError(f"unknown schedule action {data!r}; expected one of {', '.join(_ACTIONS)}")
    action: Action = _ACTIONS[name](*fields)
    return action
