"""Peak memory of a schedule: as a number with what stands there, and as a function of the size symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy

from fxmem.analysis.envelope import Terms, add_terms, envelope, to_expr, to_terms
from fxmem.analysis.liveness import Holder, liveness
from fxmem.errors import OptionError
from fxmem.ir import sizes
from fxmem.ir.program import Op, Program
from fxmem.schedule.actions import Action, Compute, Recompute

LARGEST_SOLUTION = 2**40


@dataclass(frozen=True)
class Peak:
    """The step at which most bytes stand, and what they are (largest first, adding up to `peak_bytes`)."""

    peak_bytes: int
    step: int
    op: str
    holders: tuple[Holder, ...]

    @property
    def at_peak(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes), as `BudgetInfeasible` lists them."""
        return tuple((f"{h.name} ({h.kind})" + f" {h.source}" * bool(h.source), h.nbytes) for h in self.holders)


def peak(program: Program, actions: Sequence[Action] | None = None) -> Peak:
    """Peak of `actions` (default: everything saved) at the program's hints."""
    live = liveness(program, actions)
    step = live.result.peak_step
    action = live.actions[step] if live.actions else None
    name = program.ops[action.op].name if isinstance(action, (Compute, Recompute)) else str(action)
    return Peak(live.result.peak_bytes, step, name, live.holders(step))


def peak_expr(program: Program, actions: Sequence[Action] | None = None) -> sympy.Expr:
    """Peak bytes of `actions` (default: everything saved) as a Max of few expressions in the size symbols.

    Exact: for all positive integer values of the symbols it equals the simulator's peak of `program.at(values)`.
    """
    live = liveness(program, actions)
    terms = [to_terms(s.nbytes) for s in program.storages]
    base = add_terms({sympy.Integer(1): program.extra_resident_bytes}, *(terms[s] for s in program.resident))
    steps = _steps(program, live.actions, live.result.lifetimes, terms, base)
    expressions = [to_expr(kept) for kept in envelope([base, *steps], program.hints)]
    return sympy.Max(*expressions, evaluate=False) if len(expressions) > 1 else expressions[0]


def _steps(
    program: Program,
    actions: Sequence[Action],
    lifetimes: Sequence[tuple[int, int, int]],
    terms: Sequence[Terms],
    base: Terms,
) -> Iterator[Terms]:
    """Bytes while each action runs."""
    born: dict[int, list[int]] = {}
    dead: dict[int, list[int]] = {}
    for storage, first, last in lifetimes:
        born.setdefault(first, []).append(storage)
        dead.setdefault(last + 1, []).append(storage)
    level = base
    nbytes = program.nbytes()
    for step, action in enumerate(actions):
        level = add_terms(level, *(terms[s] for s in born.get(step, ())))
        level = add_terms(level, *({m: -c for m, c in terms[s].items()} for s in dead.get(step, ())))
        if isinstance(action, (Compute, Recompute)):
            yield add_terms(level, _workspace(program, program.ops[action.op], nbytes))
        else:
            yield level


def _workspace(program: Program, op: Op, nbytes: list[int]) -> Terms:
    """Workspace bytes of `op`, growing as `Program.at` has them grow."""
    storage = program.scale_storage(op, nbytes) if op.workspace_bytes else None
    if storage is None:
        return to_terms(op.workspace_bytes)
    size = op.workspace_bytes * program.storages[storage].nbytes / sympy.Integer(nbytes[storage])
    return to_terms(sympy.ceiling(sympy.expand(size)))


def solve_max(
    expr: sympy.Expr | int, symbol: sympy.Symbol | str, budget_bytes: int, values: Mapping[str, int] | None = None
) -> int:
    """The largest positive integer for `symbol` with `expr` <= `budget_bytes`; 0 if not even 1 fits.

    `values`: the other symbols. `expr` must not fall as `symbol` grows. Raises OptionError when it does not depend on
    `symbol`, so that every value fits or none.
    """
    name = str(symbol)
    expr = sympy.sympify(expr)
    if name not in {s.name for s in expr.free_symbols}:
        used = ", ".join(sorted(map(str, expr.free_symbols))) or "no symbol"
        raise OptionError(f"the peak {expr} does not depend on {name} (it depends on {used})")
    known = {s: values[s.name] for s in expr.free_symbols if values and s.name in values and s.name != name}
    fixed = expr.subs(known)

    def fits(value: int) -> bool:
        return sizes.evaluate(fixed, {name: value}) <= budget_bytes

    low, high = 0, 1
    while high <= LARGEST_SOLUTION and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
