"""Bytes for people, and aligned."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def unit_of(nbytes: float) -> tuple[str, int]:
    """The unit that people would name `nbytes` in, and its bytes: 1536 -> ('KiB', 1024)."""
    power = next((i for i in range(len(_UNITS)) if abs(nbytes) < 1024 ** (i + 1)), len(_UNITS) - 1)
    return _UNITS[power], 1024**power


def format_bytes(nbytes: float) -> str:
    """Bytes for people, in powers of 1024: 1536 -> '1.50 KiB'."""
    unit, divisor = unit_of(nbytes)
    return f"{nbytes / divisor:.0f} {unit}" if unit == "B" else f"{nbytes / divisor:.2f} {unit}"


def align_up(nbytes: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that holds `nbytes`."""
    return -(-nbytes // alignment) * alignment
