"""What a plan's file may hold, checked before anything is made of it: a file may come from anywhere.

Numbers are bounded so that no sum of them overflows 64 bits, and indices are those of things that exist. What the
schedule means is the simulator's to judge.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxmem.schedule.actions import TIERS

MAX = 2**50
"""Of bytes (1 PiB), seconds, and sizes of tensors."""
_MAX_DIGITS = 24

Check = Callable[[Any, str], None]


def parse(text: str) -> Any:
    """JSON without NaN, infinities and numbers of absurd length. Raises ValueError, RecursionError."""
    return json.loads(text, parse_int=_int, parse_float=_float, parse_constant=_refuse)


def _int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"the number {text[:_MAX_DIGITS]} is infinite")
    return float(text)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def verify_plan_data(data: Any) -> None:
    """Raise ValueError, naming the place, unless `data` has the form of `Plan.to_json`."""
    _mapping(_PLAN)(data, "plan")
    program = data["program"]
    _list_of(_fission)(program.get("fissions", []), "fissions")
    _verify_program(program)
    if "unsplit" in program:
        _mapping(_PROGRAM)(program["unsplit"], "unsplit")
        _needs("unsplit" not in program["unsplit"], "unsplit", program["unsplit"], "a program that was not split")
        _verify_program(program["unsplit"])
    for number, action in enumerate(data["actions"]):
        _verify_action(action, f"action {number}", len(program["ops"]), len(program["sizes"]))
    _needs(data["actions"].count(["StartBackward"]) == 1, "actions", data["actions"], "a schedule with one boundary")


def _verify_program(program: Any) -> None:
    num_ops, num_storages = len(program["ops"]), len(program["sizes"])
    for key, count in (("fw_outputs", num_ops), ("bw_outputs", num_ops), ("static", num_ops)):
        _list_of(_index(count))(program[key], key)
    for number, op in enumerate(program["ops"]):
        for key, count in (("args", number), ("storages", num_storages), ("mutates", num_storages)):
            _list_of(_index(count))(op[key], f"{key} of op {number}")
        if "part" in op:
            _part(op["part"], f"part of op {number}", program.get("fissions", []))
    _needs(len(program["devices"]) == num_storages, "devices", program["devices"], f"a list of {num_storages}")


def verify_sizes(nbytes: Sequence[int]) -> None:
    """Raise ValueError unless sizes, as they come out at the hints, are sizes."""
    for storage, size in enumerate(nbytes):
        _nat(size, f"the size of storage {storage}")
    _nat(sum(nbytes), "the sum of all sizes")


def _verify_action(action: Any, where: str, num_ops: int, num_storages: int) -> None:
    _needs(isinstance(action, list) and bool(action) and isinstance(action[0], str), where, action, "an action")
    name, *fields = action
    if fields:
        _index(num_ops if name in ("Compute", "Recompute") else num_storages)(fields[0], where)
    if fields[1:]:
        _needs(fields[1] in TIERS, where, action, f"to one of {', '.join(TIERS)}")


def _needs(condition: bool, where: str, value: Any, what: str) -> None:
    if not condition:
        shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else repr(value)[:60]
        raise ValueError(f"{where} is {shown}, not {what}")


def _is(kind: type, what: str) -> Check:
    return lambda value, where: _needs(isinstance(value, kind), where, value, what)


def _nat(value: Any, where: str) -> None:
    _needs(isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX, where, value, f"0..{MAX}")


def _seconds(value: Any, where: str) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    _needs(is_number and 0 <= value <= MAX, where, value, "a number of seconds")


def _difference(value: Any, where: str) -> None:
    """Of seconds: a plan may save some."""
    _seconds(abs(value) if isinstance(value, (int, float)) else value, where)


def _link(value: Any, where: str) -> None:
    _needs(isinstance(value, list) and len(value) == 3, where, value, "[bytes/s out, bytes/s in, latency]")
    for number in value:
        _seconds(number, where)
    _needs(min(value[:2]) > 0, where, value[:2], "positive bandwidths")


def _fission(value: Any, where: str) -> None:
    _needs(isinstance(value, list) and len(value) == 5, where, value, "[seed, dim, offsets, fuse, min_bytes]")
    seed, dim, offsets, fuse, min_bytes = value
    for number in (seed, dim, min_bytes):
        _nat(number, where)
    _list_of(_nat)(offsets, f"{where}: offsets")
    _needs(len(offsets) > 1 and offsets[0] == 0 and sorted(set(offsets)) == offsets, where, offsets, "borders of parts")
    _flag(fuse, where)


def _part(value: Any, where: str, fissions: Sequence[Any]) -> None:
    _needs(isinstance(value, list) and len(value) == 3, where, value, "[op, number, region]")
    op, number, region = value
    _text(op, where)
    _index(len(fissions))(region, where)
    _index(len(fissions[region][2]) - 1)(number, where)


def _index(count: int) -> Check:
    def check(value: Any, where: str) -> None:
        is_index = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < count
        _needs(is_index, where, value, f"an index below {count}")

    return check


def _hint(value: Any, where: str) -> None:
    _nat(value, where)
    _needs(value > 0, where, value, "positive")


def _none_or(check: Check) -> Check:
    return lambda value, where: None if value is None else check(value, where)


def _one_of(*choices: str) -> Check:
    return lambda value, where: _needs(
        isinstance(value, str) and value in choices, where, value, f"one of {', '.join(choices)}"
    )


def _list_of(check: Check) -> Check:
    def verify(value: Any, where: str) -> None:
        _list(value, where)
        for number, item in enumerate(value):
            check(item, f"{where}[{number}]")

    return verify


def _dict_of(check: Check) -> Check:
    def verify(value: Any, where: str) -> None:
        _dict(value, where)
        for key, item in value.items():
            check(item, f"{where}[{key[:60]!r}]")

    return verify


def _mapping(checks: Mapping[str, Check]) -> Check:
    def verify(value: Any, where: str) -> None:
        _dict(value, where)
        for key, check in checks.items():
            _needs(key in value, f"{where}: {key}", None, "there to be read")
            check(value[key], f"{where}: {key}")

    return verify


_text, _flag = _is(str, "text"), _is(bool, "true or false")
_list, _dict = _is(list, "a list"), _is(dict, "a mapping")
_OP: dict[str, Check] = {
    "name": _text, "target": _text, "kind": _one_of("input", "op"), "phase": _one_of("fw", "bw"), "time": _seconds,
    "args": _list, "storages": _list, "workspace": _nat, "mutates": _list, "random": _flag, "collective": _flag,
    "recomputable": _flag, "source": _text, "label": _text, "module": _text,
}  # fmt: skip
_PROGRAM: dict[str, Check] = {
    "name": _text, "ops": _list_of(_mapping(_OP)), "sizes": _list, "devices": _list_of(_text), "fw_outputs": _list,
    "bw_outputs": _list, "static": _list, "hints": _dict_of(_hint), "extra_resident_bytes": _nat, "graph": _text,
}  # fmt: skip
_PLAN: dict[str, Check] = {
    "planner": _text, "budget_bytes": _none_or(_nat), "lower_bound_s": _difference, "solve_s": _seconds,
    "notes": _dict_of(lambda value, where: None), "links": _dict_of(_link), "actions": _list,
    "program": _mapping(_PROGRAM),
}  # fmt: skip
