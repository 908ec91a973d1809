"""Linear and integer programs by HiGHS, one thread, ended by counted effort: the same answer on every run.

HiGHS reports its progress at fixed places of its search ("checks"). What one costs depends on the number of nonzeros
and on whether the root is still being worked on; the figures below were fitted to moment programs of 300 to 15,000
columns (mostly within a factor of two of the seconds measured).
"""

from __future__ import annotations

from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt
from scipy.sparse import csc_array

from fxmem.planners.effort import Effort

FloatArray = npt.NDArray[np.float64]

_COLUMN_S, _NONZERO_S = 2e-5, 1e-6  # presolve and the first relaxation of an integer program
_ITERATION_S = 2e-5  # of the simplex method in a linear one
_ROOT_CHECK_S, _TREE_CHECK_S = (6e-3, 6e-7), (5e-4, 4e-8)  # a check, and so much more per nonzero


@dataclass(frozen=True)
class Result:
    """`x`: the best solution found, if any; `bound`: no solution has a smaller objective (inf: there is none, -inf:
    nothing is known); `is_optimal`: up to the gap asked for."""

    x: FloatArray | None
    bound: float
    is_optimal: bool


def minimise(
    cost: FloatArray, matrix: csc_array, low: FloatArray, upper: FloatArray, integral: npt.NDArray[np.bool_],
    effort: Effort, limit_s: float, gap: float = 1e-6,
) -> Result:  # fmt: skip
    """Minimise `cost` @ x with `matrix` @ x >= `low` and 0 <= x <= `upper`, x integer where `integral`.

    Ends when `limit_s` seconds of `effort` are spent, without having begun if it takes that long to begin.
    """
    is_mixed, nonzeros = bool(integral.any()), int(matrix.nnz)
    begin_s = _NONZERO_S * nonzeros + (_COLUMN_S * len(cost) if is_mixed else 0.0)
    if begin_s >= limit_s:
        return Result(None, -np.inf, False)
    solver = _solver(cost, matrix, low, upper, integral)
    solver.setOptionValue("mip_rel_gap", gap)
    spent_s = begin_s
    if is_mixed:
        root_s, tree_s = (fixed + each * nonzeros for fixed, each in (_ROOT_CHECK_S, _TREE_CHECK_S))

        def check(event: highspy.HighsCallbackEvent) -> None:
            nonlocal spent_s
            spent_s += tree_s if event.data_out.mip_node_count > 0 else root_s
            if spent_s > limit_s:
                event.interrupt()

        solver.cbMipInterrupt += check
    else:
        solver.setOptionValue("simplex_iteration_limit", int(min((limit_s - begin_s) / _ITERATION_S, 2e9)))
    solver.run()
    info, status = solver.getInfo(), solver.getModelStatus()
    if not is_mixed:
        spent_s += _ITERATION_S * max(info.simplex_iteration_count, 0)
    effort.spend(min(spent_s, limit_s))
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Result(None, np.inf, True)
    is_optimal = status == highspy.HighsModelStatus.kOptimal
    has_x = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    x = np.array(solver.getSolution().col_value) if has_x else None
    if is_mixed:
        return Result(x, float(info.mip_dual_bound), is_optimal)
    return Result(x, float(info.objective_function_value), True) if is_optimal else Result(None, -np.inf, False)


class _Silent(highspy.Highs):
    """Without the banner that HiGHS prints as soon as it is made."""

    def enableCallbacks(self) -> None:  # noqa: N802
        self.silent()
        super().enableCallbacks()  # type: ignore[no-untyped-call]


def _solver(
    cost: FloatArray, matrix: csc_array, low: FloatArray, upper: FloatArray, integral: npt.NDArray[np.bool_]
) -> highspy.Highs:
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(cost), len(low)
    program.col_cost_, program.col_lower_, program.col_upper_ = cost, np.zeros(len(cost)), upper
    program.row_lower_, program.row_upper_ = low, np.full(len(low), highspy.kHighsInf)
    program.a_matrix_.start_, program.a_matrix_.index_ = matrix.indptr, matrix.indices
    program.a_matrix_.value_ = matrix.data
    if integral.any():
        kinds = highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger
        program.integrality_ = [kinds[int(one)] for one in integral]
    solver = _Silent()  # type: ignore[no-untyped-call]
    solver.setOptionValue("threads", 1)
    solver.passModel(program)
    return solver
