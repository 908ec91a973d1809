"""The intermediate representation: a read-only typed view of a joint training graph."""

from fxmem.ir.program import Op, Program, Storage

__all__ = ["Op", "Program", "Storage"]
