"""The kinds of steps that were seen, looked up by the calls that a step begins with."""

from __future__ import annotations

from collections.abc import Iterator

from fxmem.step.call import Key
from fxmem.step.known import Known

Prefix = tuple[Key, ...]


class Kinds:
    """Each kind is found by all its calls, and by those it begins with if it is the most demanding that does."""

    def __init__(self) -> None:
        self._by_prefix: dict[Prefix, Known] = {}

    def __iter__(self) -> Iterator[Known]:
        """Each kind once."""
        return iter(dict.fromkeys(self._by_prefix.values()))

    def get(self, prefix: Prefix) -> Known | None:
        """The kind found by exactly these calls, of these sizes."""
        return self._by_prefix.get(prefix)

    def find(self, prefix: Prefix) -> Known | None:
        """The kind that begins so; for calls of several graphs also one of other sizes, the most demanding."""
        known = self._by_prefix.get(prefix)
        if known is not None:
            return known if known.is_alive else None
        numbers = [key[0] for key in prefix]
        alike = (k for k in self if len(k.prefix) > 1 and k.is_alive)
        alike = (k for k in alike if [key[0] for key in k.prefix[: len(prefix)]] == numbers)
        return max(alike, key=lambda k: k.unplanned_bytes, default=None)

    def like(self, prefix: Prefix) -> Known | None:
        """The kind that a step of these calls belongs to; of several graphs, other sizes are the same kind."""
        known = self.find(prefix)
        return known if known is not None and len(known.prefix) == len(prefix) else None

    def drop_dead(self) -> None:
        """Forget those whose graphs no longer run."""
        self._by_prefix = {prefix: known for prefix, known in self._by_prefix.items() if known.is_alive}

    def remember(self, known: Known) -> None:
        """Of kinds that begin alike, the most demanding is the one to expect."""
        numbers = [key[0] for key in known.prefix]
        several = len(numbers) > 1

        def is_replaced(other: Known) -> bool:
            return other.prefix == known.prefix or (several and [key[0] for key in other.prefix] == numbers)

        self._by_prefix = {p: k for p, k in self._by_prefix.items() if k.is_alive and not is_replaced(k)}
        for length in range(1, len(known.prefix) + 1):
            other = self._by_prefix.get(known.prefix[:length])
            if other is None or length == len(known.prefix) or other.unplanned_bytes < known.unplanned_bytes:
                self._by_prefix[known.prefix[:length]] = known
