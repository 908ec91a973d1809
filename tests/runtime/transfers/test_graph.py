"""Offload in a joint graph: right gradients whatever the timing, the planned peak, flat levels, clear errors."""

from __future__ import annotations

import errno
import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxmem import compat
from fxmem.capture import JointGraph, boxed, capture
from fxmem.errors import OffloadError, VerifyError
from fxmem.ir.from_fx import program_from_joint
from fxmem.ir.program import Program
from fxmem.passes import rewrite
from fxmem.passes.offload import Transfers, open_transfers, verify_offload, why_not_offloadable
from fxmem.runtime.transfers.engine import Hook
from fxmem.schedule import simulate
from fxmem.schedule.actions import Action, Offload, Reload, Tier, Wait
from fxmem.schedule.simulate import resident_bytes
from fxmem.step.lower import backend, lower
from tests.runtime.transfers.contract import Faults
from tests.runtime.transfers.plans import MACHINE, full_plan, offload_plan, saved_storages

TIERS: tuple[Tier, ...] = ("host", "disk")


class Model(nn.Module):
    """Transposes, views of one storage, an op with several results, an expanded tensor, low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 48), nn.Linear(16, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = torch.tanh(self.first(x)).split(16, dim=-1)
        mixed = torch.softmax(a @ b.t(), dim=-1) @ c
        y = self.norm(torch.sigmoid(self.second(mixed))).bfloat16()
        y = (y * y.mean(0, keepdim=True).expand_as(y)).float().t().exp()
        top, _ = torch.topk(y, 5, dim=0)
        return top.sin().sum() + (y.t() @ y).cos().mean()


@dataclass
class Case:
    """The model's joint graph, its Program, inputs and the gradients of the unplanned graph."""

    joint: JointGraph
    program: Program
    args: list[Tensor]

    @cached_property
    def full(self) -> tuple[Action, ...]:
        return full_plan(self.program)

    @cached_property
    def saved(self) -> list[int]:
        return saved_storages(self.program, self.full, self.joint)

    @cached_property
    def expected(self) -> list[Any]:
        return Run(self, self.full).step()

    def plan(self, seed: int | None = None, tiers: Sequence[Tier] = TIERS) -> tuple[Action, ...]:
        return offload_plan(self.program, self.full, self.saved, tiers, seed)


class Run:
    """A plan lowered to forward and backward, called as autograd would."""

    def __init__(
        self, case: Case, actions: tuple[Action, ...], folder: Path | None = None, hook: Hook | None = None
    ) -> None:
        self.case = case
        self.transfers: Transfers = open_transfers(case.program, actions, folder, hook)
        self.joint = rewrite(case.joint, case.program, actions, self.transfers.key)
        lowered = lower(self.joint)
        self._forward, self._backward = boxed(lowered.forward), boxed(lowered.backward)

    def forward(self) -> tuple[list[Any], list[Any]]:
        """Results, and what is saved for backward."""
        with torch.no_grad():
            values = list(self._forward(list(self.case.args)))
        count = self.case.joint.num_forward_outputs
        return values[:count], values[count:]

    def backward(self, saved: list[Any], tangent: Tensor | None = torch.ones(())) -> list[Any]:  # noqa: B008
        """Gradients. Empties `saved`, so that what is in it dies at its last use."""
        arguments = [*saved, tangent]
        saved.clear()
        with torch.no_grad():
            return list(self._backward(arguments))

    def step(self) -> list[Any]:
        results, saved = self.forward()
        return [*results, *self.backward(saved)]


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return all(
        a is b is None or torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.fixture(scope="module")
def case() -> Case:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(32, 24)
    (joint,) = capture(model, (x,), frontend="aot")
    return Case(joint, program_from_joint(joint), [*model.parameters(), x])


@pytest.fixture
def opened(case: Case, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """`opened(actions, hook)`: a run whose engine is closed at the end; no file may be left then."""
    runs: list[Run] = []

    def make(actions: tuple[Action, ...], hook: Hook | None = None) -> Run:
        runs.append(Run(case, actions, tmp_path, hook))
        return runs[-1]

    yield make
    for run in runs:
        run.transfers.close()
    assert list(tmp_path.iterdir()) == []


def test_everything_saved_can_move(case: Case, opened: Callable[..., Run]) -> None:
    assert len(case.saved) >= 8
    actions = case.plan()
    run = opened(actions)
    assert same(run.step(), case.expected)
    targets = [getattr(node.target, "__name__", "") for node in run.joint.nodes]
    for name in ("offload", "free", "reload", "wait"):
        assert targets.count(f"{name}.default") == len(case.saved), "a storage moves once, whatever views are read"
    simulated, full = simulate(case.program, actions, MACHINE), simulate(case.program, case.full)
    assert simulated.peak_bytes < full.peak_bytes


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 100), marks=pytest.mark.slow)], ids=["20", "80 more"]
)
def test_random_plans_under_random_delays(case: Case, opened: Callable[..., Run], seeds: range) -> None:
    for seed in seeds:
        run = opened(case.plan(seed), Faults(seed, delay_s=0.001))
        assert same(run.step(), case.expected), f"seed {seed}"
        run.transfers.close()


def test_only_handles_cross_the_boundary(case: Case, opened: Callable[..., Run]) -> None:
    _, saved = opened(case.plan()).forward()
    big = [t for t in saved if t.untyped_storage().nbytes() > 24 and not any(t is a for a in case.args)]
    assert big == []
    del saved


def test_device_bytes_do_not_depend_on_timing(case: Case, opened: Callable[..., Run]) -> None:
    """The allocator's peak is the same with and without delays, and what the simulator says."""
    actions = case.plan(seed=4, tiers=("disk",))

    def peak_bytes(hook: Hook | None) -> int:
        run = opened(actions, hook)
        run.step()
        level = peak = 0
        for delta in compat.cpu_memory_deltas(run.step)[1]:
            level += delta
            peak = max(peak, level)
        return peak

    fast, slow = peak_bytes(None), peak_bytes(Faults(1, delay_s=0.005))
    beside = simulate(case.program, actions, MACHINE).peak_bytes - resident_bytes(case.program)
    tangent_bytes, handles_bytes = 4, 256  # made before the step; 24 bytes each
    assert fast == slow
    assert 0 <= fast - (beside - tangent_bytes) <= handles_bytes
    assert fast < simulate(case.program, case.full).peak_bytes - resident_bytes(case.program)


def test_levels_are_flat(case: Case, opened: Callable[..., Run]) -> None:
    """200 steps; some backwards are skipped, some raise, some forwards are in flight together."""
    run = opened(case.plan(seed=2))
    engine = run.transfers.engine
    assert engine is not None
    for number in range(200):
        _, saved = run.forward()
        if number % 5 == 1:
            with pytest.raises((TypeError, RuntimeError)):
                run.backward(saved, None)
        elif number % 5 != 2:
            if number % 5 == 3:
                _, later = run.forward()
                assert same(run.backward(later), case.expected[1:])
            assert same(run.backward(saved), case.expected[1:])
        del saved
    gc.collect()
    levels, layout = engine.levels(), run.transfers.layout
    assert (levels.num_steps, levels.pending_device_bytes) == (0, 0)
    assert levels.num_arenas == engine.num_allocations <= 3
    assert levels.host_bytes == levels.num_arenas * layout.host_bytes
    assert levels.disk_bytes == levels.num_arenas * layout.disk_bytes


def test_backward_twice(case: Case, opened: Callable[..., Run]) -> None:
    """retain_graph=True: the handles live on, and so does what they stand for."""
    run = opened(case.plan())
    _, saved = run.forward()
    for _ in range(3):
        assert same(run.backward(list(saved)), case.expected[1:])


@pytest.mark.parametrize("moment", ["out", "in"])
def test_failed_step(case: Case, opened: Callable[..., Run], moment: Any) -> None:
    faults = Faults()
    run = opened(case.plan(seed=1), faults)
    engine = run.transfers.engine
    assert engine is not None
    for _ in range(3):
        faults.errors[moment] = OSError(errno.EIO, "injected")
        with pytest.raises(OffloadError, match="injected"):
            run.step()
        assert engine.levels().pending_device_bytes == 0
        assert same(run.step(), case.expected)
    gc.collect()
    assert engine.levels().num_steps == 0


def test_closed_engine_is_named(case: Case, opened: Callable[..., Run]) -> None:
    run = opened(case.plan())
    run.transfers.close()
    with pytest.raises(OffloadError, match="no engine"):
        run.step()


def test_reasons(case: Case) -> None:
    reasons = why_not_offloadable(case.joint, case.program, min_bytes=5000)
    assert set(case.program.resident) <= reasons.keys()
    said = set(reasons.values())
    assert {"it is returned", "it is smaller than 5000 bytes"} <= said
    assert all(storage not in reasons for storage in case.saved if case.program.nbytes()[storage] >= 5000)
    resident = case.program.resident[0]
    assert "input of the step" in reasons[resident]


def test_verifier_finds_a_read_after_free(case: Case) -> None:
    actions = case.plan()
    joint = rewrite(case.joint, case.program, actions)
    verify_offload(joint)
    wait = next(n for n in joint.nodes if getattr(n.target, "__name__", "") == "wait.default")
    base = next(n for n in joint.nodes if n.name == wait.name.removesuffix("_wait"))
    wait.replace_all_uses_with(base)
    with pytest.raises(VerifyError, match=rf"reads {base.name}, whose bytes {base.name}_free gave up"):
        verify_offload(joint)


def test_dead_code_elimination_keeps_transfers(case: Case) -> None:
    joint = rewrite(case.joint, case.program, case.plan())
    before = [n.name for n in joint.nodes if "fxmem" in str(n.target)]
    joint.graph_module.graph.eliminate_dead_code()
    assert [n.name for n in joint.nodes if "fxmem" in str(n.target)] == before


def test_a_reload_that_nobody_reads_is_waited_for(case: Case, opened: Callable[..., Run]) -> None:
    """Its bytes would stay with the engine to the end of the step."""
    storage = case.saved[0]
    actions = (*case.plan(), Reload(storage), Wait(storage))
    run = opened(actions)
    assert same(run.step(), case.expected)
    _, saved = run.forward()
    run.backward(handles := list(saved))
    engine = run.transfers.engine
    assert engine is not None
    assert not handles
    assert engine.levels().num_steps == 1, "its handles are alive"
    assert engine.levels().pending_device_bytes == 0


def test_plan_without_offload_needs_no_engine(case: Case) -> None:
    transfers = open_transfers(case.program, case.full)
    assert (transfers.key, transfers.engine) == (0, None)


def test_devices_do_not_mix(case: Case) -> None:
    storages = [replace(s, device="cuda:0") if s.id == case.saved[0] else s for s in case.program.storages]
    program = replace(case.program, storages=tuple(storages))
    with pytest.raises(VerifyError, match="several devices"):
        open_transfers(program, [Offload(case.saved[0]), Offload(case.saved[1])])


def _moving_bytes(transfers: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [transfer for transfer in transfers if transfer[0] != "wait"]


@pytest.mark.slow
@importlib.import_module("torch._inductor.config").patch(reorder_for_peak_memory=False)
def test_under_inductor(tmp_path: Path) -> None:
    """Compiled code runs every transfer and gives the gradients of the unplanned one.

    What takes or gives back bytes keeps the order of the plan; a wait may come earlier, which costs time, not bytes.
    The order holds only if inductor is told not to reorder for memory; values are right either way.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    x = torch.randn(16, 32)
    calls: list[tuple[str, int]] = []
    planned: list[tuple[str, int]] = []
    opened: list[Transfers] = []

    def partition(offloads: bool, joint: JointGraph) -> Any:
        program = program_from_joint(joint)
        actions = full_plan(program)
        if offloads:
            actions = offload_plan(program, actions, saved_storages(program, actions, joint), TIERS, seed=0)
        opened.append(open_transfers(program, actions, tmp_path))
        joint = rewrite(joint, program, actions, opened[-1].key)
        if offloads:
            _record(opened[-1].engine, calls)
            planned.extend(_transfers(joint))
        return lower(joint).forward, lower(joint).backward

    def gradients(offloads: bool) -> list[Any]:
        torch.compiler.reset()
        compiled = torch.compile(model, backend=backend(partial(partition, offloads), "inductor", f"{offloads}"))
        for _ in range(2):
            model.zero_grad()
            calls.clear()
            compiled(x).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected = gradients(False)
    assert same(gradients(True), expected)
    assert sorted(calls) == sorted(planned)
    assert _moving_bytes(calls) == _moving_bytes(planned)
    assert len(planned) >= 12
    for transfers in opened:
        transfers.close()
    assert list(tmp_path.iterdir()) == []


def _transfers(joint: JointGraph) -> Iterator[tuple[str, int]]:
    """(verb, slot) of the transfer nodes, in order."""
    slots: dict[Any, int] = {}
    for node in joint.nodes:
        if "fxmem" in str(node.target):
            verb = node.target.__name__.removesuffix(".default")  # type: ignore[union-attr]
            source = node.args[1] if verb == "wait" else node.args[0]
            slots[node] = node.args[2] if verb == "offload" else slots[source]  # type: ignore[assignment]
            yield verb, slots[node]


def _record(engine: Any, calls: list[tuple[str, int]]) -> None:
    def recording(verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(step: Any, slot: int, *args: Any) -> Any:
            calls.append((verb, slot))
            return call(step, slot, *args)

        return recorded

    for verb in ("offload", "free", "reload", "wait"):
        setattr(engine, verb, recording(verb, getattr(engine, verb)))
