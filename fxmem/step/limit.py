"""The bytes that steps are held to, from the budget as it was asked for."""

from __future__ import annotations

from fxmem.budget import Budget, resolve_budget


class Limit:
    """`asked`: a budget. Raises OptionError if it is malformed."""

    def __init__(self, asked: Budget) -> None:
        self.asked = asked
        resolved = resolve_budget(asked)
        self._share = resolved if isinstance(resolved, float) else None
        self.nbytes = resolved if isinstance(resolved, int) else None
        """None: no limit, the smallest budget, or a fraction of a step that was not seen yet."""

    @property
    def budget(self) -> Budget:
        """What plans are made for: bytes where they are known."""
        return self.asked if self.nbytes is None else self.nbytes

    def see(self, unplanned_bytes: int) -> None:
        """A fraction is one of the first step's peak without a plan, in bytes from then on."""
        if self._share is not None and self.nbytes is None:
            self.nbytes = int(self._share * unplanned_bytes)

    def grow(self, nbytes: int) -> None:
        """So much more stands in every step than in the first one, of which the budget is a fraction."""
        if self._share is not None and self.nbytes is not None:
            self.nbytes += int(self._share * nbytes)
