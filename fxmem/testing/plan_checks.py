"""What must hold of programs, schedules, plans and planners: checks against an oracle and against real runs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from fxmem.capture import JointGraph
from fxmem.errors import BudgetInfeasible, VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program, verify_program
from fxmem.passes.checkpoint import Checkpoint, rewrite
from fxmem.passes.offload import open_transfers
from fxmem.planners.plan import Plan, baseline_actions, judge
from fxmem.planners.problem import reduce_program
from fxmem.planners.registry import Options, Planner, get_planner
from fxmem.planners.tiers import fits
from fxmem.runtime.transfers.layout import plan_layout
from fxmem.schedule import Action, simulate
from fxmem.step.lower import lower
from fxmem.testing.observe import difference
from fxmem.testing.pass_checks import check_pass, example_args
from fxmem.testing.random_programs import check_schedule
from fxmem.testing.random_transfers import check_layout

ROUNDING = 1e-9  # of the baseline's seconds: sums of the same numbers in another order


def check_program(program: Program) -> None:
    """Assert that `program` is consistent (`verify_program`), is the same after JSON, and that everything saved is a
    valid schedule of it. Raises AssertionError."""
    try:
        verify_program(program)
    except VerifyError as error:
        raise AssertionError(str(error)) from error
    again = Program.from_json(json.loads(json.dumps(program.to_json())))
    assert again == program, f"{program.name} is another program after JSON"
    check_schedule(program, baseline_actions(reduce_program(program)))


def check_plan(plan: Plan) -> None:
    """Assert that a plan is valid and says the truth.

    Its schedule is valid, agrees with the oracle and stays under the budget and each tier's capacity; peak, seconds and
    lower bound are those of the schedule; offloaded bytes have places that nobody else uses meanwhile; JSON keeps it.
    With a captured graph (`plan.joint`), `check_rewrite` too. Raises AssertionError.
    """
    program, machine = plan.program, plan.machine
    peak_bytes = check_schedule(program, plan.actions, plan.budget_bytes, machine)
    result = simulate(program, plan.actions, machine)
    assert plan.peak_bytes == peak_bytes, f"the plan says {plan.peak_bytes} bytes, its schedule peaks at {peak_bytes}"
    assert fits(result, machine), f"a tier holds more than it can: {dict(result.tier_peak_bytes)}"
    slack_s = ROUNDING * max(plan.baseline_s, 1.0)
    assert abs(plan.baseline_s + plan.extra_s - result.seconds) <= slack_s, "the plan's seconds are not its schedule's"
    assert plan.lower_bound_s <= plan.extra_s + slack_s, f"lower bound {plan.lower_bound_s} s above {plan.extra_s} s"
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).actions == plan.actions, "JSON changes the schedule"
    for staged in (False, True):
        check_layout(plan_layout(program, plan.actions, staged))
    if plan.joint is not None:
        check_rewrite(plan.joint, plan.actions, program)


def check_planner(
    planner: str | Planner, program: Program, budget_bytes: int, options: Options | None = None
) -> Plan | None:
    """Assert that `planner` keeps its word on `program`: a plan under the budget that passes `check_plan`, or a refusal
    that names a larger budget under which there is one. Returns the plan, None for a refusal. Raises AssertionError."""
    options = options or Options()
    plan = _plan(planner, program, budget_bytes, options)
    if isinstance(plan, Plan):
        check_plan(plan)
        return plan
    least = plan.min_bytes
    assert least > budget_bytes, f"refused {budget_bytes} bytes, yet says that {least} are enough"
    again = _plan(planner, program, least, replace(options, effort=type(options.effort)()))
    if isinstance(again, Plan):
        check_plan(again)
    else:
        found = simulate(program, plan.actions, options.machine).peak_bytes if plan.actions else None
        assert found is not None, f"refused {least} bytes, the least that it named, without a schedule"
        assert found <= least, f"the schedule under {least} bytes that the refusal carries peaks at {found}"
    return None


def _plan(planner: str | Planner, program: Program, budget_bytes: int, options: Options) -> Plan | BudgetInfeasible:
    solve: Callable[..., Any] = get_planner(planner) if isinstance(planner, str) else planner
    name = planner if isinstance(planner, str) else getattr(planner, "__name__", "planner")
    try:
        solution = solve(reduce_program(program), budget_bytes, options)
        plan = judge(program, solution.actions, name, budget_bytes, options.machine)
    except BudgetInfeasible as error:
        return error
    except VerifyError as error:
        raise AssertionError(f"{name} under {budget_bytes} bytes: {error}") from error
    return replace(plan, lower_bound_s=max(0.0, solution.lower_bound_s - ROUNDING * plan.baseline_s))


def check_rewrite(
    joint: JointGraph,
    actions: Sequence[Action],
    program: Program | None = None,
    args: Sequence[Any] | None = None,
    *,
    offload_dir: str | None = None,
) -> None:
    """Assert that `joint` played as `actions` computes what it computed, bit by bit, transfers included.

    The rewritten graph passes `check_pass`; run as forward and backward apart (as AOTAutograd does), it gives the same;
    without offloads its own program peaks no higher than the schedule. `args`: see `check_pass`. Raises AssertionError.
    """
    program = program or program_from_joint(joint)
    args = example_args(joint) if args is None else args
    transfers = open_transfers(program, actions, offload_dir)
    try:
        check_pass(Checkpoint(program, tuple(actions), transfers.key), joint, args)
        rewritten = rewrite(joint, program, tuple(actions), transfers.key)
        _check_halves(joint, rewritten, args)
    finally:
        transfers.close()
    if not (transfers.layout.slots or any(op.workspace_bytes for op in program.ops)):
        again = program_from_joint(rewritten)
        expected = simulate(program, actions).peak_bytes - program.extra_resident_bytes
        found = simulate(again, baseline_actions(reduce_program(again))).peak_bytes
        assert found <= expected, f"the rewritten graph peaks at {found} bytes, the schedule at {expected}"


def _check_halves(joint: JointGraph, rewritten: JointGraph, args: Sequence[Any]) -> None:
    expected, found = (_run_halves(graph, args) for graph in (joint, rewritten))
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        text = difference(one, other)
        assert not text, f"run as forward and backward, output {index} {text}"


def _run_halves(joint: JointGraph, args: Sequence[Any], seed: int = 0) -> list[Any]:
    """All outputs of the joint graph, run as its two halves on copies of `args`."""
    lowered = lower(joint)
    num_tangents = len(joint.tangents)
    copies = copy.deepcopy(list(args))  # keeps strides, on which the captured graph counts
    inputs, tangents = copies[: len(args) - num_tangents], copies[len(args) - num_tangents :]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        results = list(fx.Interpreter(lowered.forward).run(*inputs, enable_io_processing=False))
        outputs, saved = results[: joint.num_forward_outputs], results[joint.num_forward_outputs :]
        tensors, sizes = saved[: len(lowered.saved)], saved[len(lowered.saved) :]
        gradients = fx.Interpreter(lowered.backward).run(*sizes, *tensors, *tangents, enable_io_processing=False)
    return [*outputs, *gradients]

