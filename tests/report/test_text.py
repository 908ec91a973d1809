"""The plan as text: no column is lost, whatever the length of the model's lines."""

from dataclasses import replace

import fxmem
from fxmem.report.text import summary
from tests.models import blocks


def test_bytes_and_kinds_are_shown_beside_long_lines():
    module, args = blocks()
    plan = fxmem.plan(module, args, budget=None)
    ops = tuple(replace(op, source=f"/somewhere/{'deep/' * 30}model.py:1: {'x' * 200}") for op in plan.program.ops)
    text = summary(replace(plan, program=replace(plan.program, ops=ops)))
    table = text.split("what stands at the peak")[1].split("values backward needs")[0]
    assert "KiB" in table
    assert "resident" in table
    assert "deep/model.py:1" in table
