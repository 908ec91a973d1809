"""`fxmem.plan` and Plan: ahead of time, saved and loaded, applied; options and errors."""

import contextlib
import copy
import json
import pickle
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxmem
from tests.models import Blocks, blocks, gradients


@pytest.fixture(scope="module")
def planned():
    module, args = blocks()
    return module, args, fxmem.plan(module, args, budget=0.75)


def test_figures(planned):
    _, _, plan = planned
    assert plan.peak_bytes <= plan.budget_bytes == int(0.75 * plan.baseline_peak_bytes)
    assert plan.gap == (plan.extra_s - plan.lower_bound_s) / plan.baseline_s
    assert plan.peak_expr == plan.peak_bytes
    names = [node.name for node in plan.graph_module.graph.nodes]
    assert any(name.endswith("_remat") for name in names)
    assert "recompute" in str(plan)


def test_a_saved_plan_applies_to_the_same_model_only(planned, tmp_path):
    module, args, plan = planned
    plan.save(tmp_path / "plan.json")
    loaded = fxmem.Plan.load(tmp_path / "plan.json")
    assert loaded.actions == plan.actions
    assert loaded.peak_bytes == plan.peak_bytes
    step = fxmem.compile(module, plan=loaded)
    step(*args).backward()
    found = gradients(module)
    module(*args).backward()
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(module), strict=True))
    assert step.plan.actions == plan.actions
    other = fxmem.compile(Blocks(num_blocks=3), plan=loaded)
    with pytest.raises(fxmem.PlanMismatch, match="made for"):
        other(*args).backward()


@pytest.mark.parametrize("text", ["not json", "{}", '{"format": "other"}', "[]"])
def test_a_file_that_is_no_plan(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(fxmem.PlanMismatch):
        fxmem.Plan.load(tmp_path / "plan.json")


def test_a_tampered_schedule_is_refused(planned, tmp_path):
    data = planned[2].to_json()
    data["actions"] = [row for row in data["actions"] if row[0] != "Recompute"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(fxmem.PlanMismatch, match="does not hold a valid plan"):
        fxmem.Plan.load(tmp_path / "plan.json")


def test_meta_and_fake_give_the_graph_of_real_tensors(planned):
    _, args, plan = planned
    with torch.device("meta"):
        meta = Blocks()
        meta_args = tuple(torch.empty_like(x, device="meta") for x in args)
    ahead = fxmem.plan(meta, meta_args, budget=0.75)
    assert ahead.program.fingerprint == plan.program.fingerprint
    assert ahead.baseline_peak_bytes == plan.baseline_peak_bytes


def test_planning_meta_tensors_allocates_nothing_like_an_activation():
    with torch.device("meta"):
        module = Blocks(width=1024)
        args = (torch.empty(65536, 1024), torch.empty(65536, 1024))
    peak = fxmem.measure(lambda: fxmem.plan(module, args, budget=0.8)).peak_bytes
    assert peak < 65536 * 1024 * 4 / 100


def test_optimizer_state_counts(planned):
    module, args, plan = planned
    nbytes = sum(p.nbytes for p in module.parameters())
    with_adam = fxmem.plan(module, args, optimizer=torch.optim.Adam(module.parameters()))
    extra = with_adam.peak_bytes - plan.baseline_peak_bytes
    assert 2 * nbytes <= extra <= 2 * nbytes + 64 * len(list(module.parameters()))


@pytest.mark.slow
def test_max_batch_fits_and_one_more_does_not():
    module, args = blocks(batch=8)
    budget = 4_000_000
    best = fxmem.max_batch(module, args, budget=budget, fission="off")  # split: tests/step/test_max_batch.py
    wide = [tuple(torch.randn(n, 32) for _ in range(2)) for n in (best, best + 1)]
    assert fxmem.plan(module, wide[0], budget=budget, fission="off").peak_bytes <= budget
    with pytest.raises(fxmem.BudgetInfeasible):
        fxmem.plan(module, wide[1], budget=budget, fission="off")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": 1}, "did you mean 'budget'"),
        ({"planner": "magic"}, "choose one of"),
        ({"tiers": "tape"}, "host, disk"),
        ({"inner": "xla"}, "eager, inductor"),
        ({"solve_s": -1}, "positive"),
        ({"optimizer": "adam"}, "torch.optim.Optimizer"),
        ({"loss_fn": 3}, "callable"),
        ({"budget": "many"}, "malformed"),
        ({"device_spec": "abacus"}, "h100"),
        ({"plan": "plan.json"}, "fxmem.Plan"),
        ({"tiers": 3}, "'auto' for all"),
        ({"tiers": ["host", ["disk"]]}, "host, disk"),
        ({"planner": ["auto"]}, "planner's name"),
        ({"inner": []}, "eager, inductor"),
        ({"solve_s": "5"}, "number of seconds"),
        ({"solve_s": float("nan")}, "positive"),
        ({"dynamic": "yes"}, "True, False or None"),
        ({"device_spec": 3}, "preset's name"),
        ({"offload_dir": "/tmp"}, "tiers="),
        ({"tiers": "disk", "offload_dir": 3}, "folder's path"),
        ({"tiers": "disk", "offload_dir": "/nowhere/at/all"}, "No such file or directory"),
        ({"tiers": "disk", "offload_dir": __file__}, "Not a directory"),
        ({"tiers": "disk", "offload_dir": "a\0b"}, "null byte"),
    ],
)
def test_bad_options_name_the_choices(options, message):
    module, args = blocks()
    with pytest.raises(fxmem.OptionError, match=message):
        fxmem.plan(module, args, **options)
    with pytest.raises(fxmem.OptionError, match=message):
        fxmem.compile(module, **options)


def test_auto_does_without_a_disk_that_cannot_be_used(caplog):
    module, args = blocks()
    plan = fxmem.plan(module, args, tiers="auto", offload_dir="/nowhere/at/all")
    assert list(plan.machine.links) == ["host"]
    assert "/nowhere/at/all" in caplog.text


def test_a_disk_that_fails_later_is_named(monkeypatch, tmp_path):
    def fails(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fxmem.analysis.doctor._measure_disk", fails)
    module, args = blocks()
    with pytest.raises(fxmem.OffloadError, match=f"{tmp_path} can't be used"):
        fxmem.plan(module, args, 0.9, tiers="disk", offload_dir=tmp_path)


def test_uncapturable_model_names_its_line():
    class Prints(nn.Module):
        def forward(self, x):
            return torch.tensor(x.sum().item() * 2.0, requires_grad=True) * x.tolist()[0]

    with pytest.raises(fxmem.CaptureError, match="test_plan"):
        fxmem.plan(Prints(), (torch.randn(4),))


@pytest.mark.parametrize("planner", ["auto", "exact", "rotor", "full"])
def test_a_program_that_computes_nothing(planner):
    weight = torch.nn.Parameter(torch.ones(3, 3))

    def view(x):
        return weight.t()

    for budget in (None, "min", weight.nbytes):
        assert fxmem.plan(view, (torch.ones(2),), budget, planner=planner).peak_bytes == weight.nbytes
    with pytest.raises(fxmem.BudgetInfeasible, match=f"({weight.nbytes} bytes)"):
        fxmem.plan(view, (torch.ones(2),), weight.nbytes - 1, planner=planner)


@pytest.fixture(scope="module")
def files(planned, tmp_path_factory):
    """Texts of valid plans: static and symbolic sizes, with offloads."""
    module, args, plan = planned
    dynamic = fxmem.plan(module, args, budget=0.9, dynamic=True, planner="sqrt")
    offloads = fxmem.plan(module, args, budget=0.8, tiers="host", device_spec="h100-80g", planner="offload-greedy")
    assert any(type(action).__name__ == "Offload" for action in offloads.actions)
    texts = [json.dumps(made.to_json()) for made in (plan, dynamic, offloads)]
    return texts, tmp_path_factory.mktemp("plans") / "plan.json"


def test_saved_plans_are_the_same_when_loaded(files):
    texts, path = files
    for text in texts:
        path.write_text(text)
        loaded = fxmem.Plan.load(path)
        assert json.loads(json.dumps(loaded.to_json())) == json.loads(text)
        assert fxmem.Plan.from_json(loaded.to_json()) == loaded


BOMBS = [
    -1, 2**63, 2**50, 10**23, 0, 1.5, "s9", None, True, [], {}, [[]], ["Pow", 2, ["Pow", 2, 99]],
    ["Pow", ["Pow", ["Pow", "s", 64], 64], 64], ["Pow", 0, -1], ["Mod", 5, 0], ["Rational", 1, 0], ["Rational", 1, 2],
    ["floor"], ["Max"], ["__import__", "os"], ["Mul", *([2**50] * 100)], ["Add", -5, 1],
    ["Pow", -1, ["Rational", 1, 2]],
    "x" * 5000, ["Compute", -1], ["Offload", 0, "tape"], ["Reload", 0], "NaN",
]  # fmt: skip


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_only_plan_mismatch_comes_of_a_changed_file(files, seed):
    """One or two places of a valid plan changed: it is refused, or can be read, shown and saved."""
    texts, path = files
    draw = random.Random(seed)
    data = json.loads(draw.choice(texts))
    for _ in range(draw.randint(1, 2)):
        mutate(data, draw)
    path.write_text(json.dumps(data))
    with contextlib.suppress(fxmem.PlanMismatch):
        plan = fxmem.Plan.load(path)
        assert "\n" not in repr(plan)
        assert plan.diff(plan) == "the plans are the same"
        str(plan)
        json.dumps(plan.to_json(), allow_nan=False)


def mutate(data, draw):
    """Change, remove, double or swap something somewhere within."""
    while True:
        key = draw.choice(list(data) if isinstance(data, dict) else range(len(data)))
        if not isinstance(data[key], (list, dict)) or not data[key] or draw.random() < 0.1:
            break
        data = data[key]
    kind = draw.choice(["set", "set", "set", "remove", "double", "swap"])
    if kind == "set":
        numbers = (draw.randint(-5, 400), draw.uniform(-1, 1), draw.choice([1e300, float("inf"), float("nan")]))
        data[key] = copy.deepcopy(draw.choice([*BOMBS, *numbers]))  # the next change may be within it
    elif kind == "remove":
        del data[key]
    elif isinstance(data, list):
        other = draw.randrange(len(data))
        data[key], data[other] = (data[other], data[key]) if kind == "swap" else (data[key], data[key])


@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: str(bomb)[:30])
@pytest.mark.parametrize("place", ["size", "hint", "time", "args", "link", "action", "budget"])
def test_hostile_values_are_refused(files, bomb, place):
    texts, path = files
    data = json.loads(texts[1])
    symbolic = next(i for i, size in enumerate(data["program"]["sizes"]) if isinstance(size, list))
    if place == "size":
        data["program"]["sizes"][symbolic] = bomb
    elif place == "hint":
        data["program"]["hints"][next(iter(data["program"]["hints"]))] = bomb
    elif place in ("time", "args"):
        data["program"]["ops"][-1][place] = bomb if place == "time" else [bomb]
    elif place == "link":
        data["links"]["host"] = [bomb, 1, 0]
    else:
        data.update({"actions": [bomb, *data["actions"]]} if place == "action" else {"budget_bytes": bomb})
    path.write_text(json.dumps(data))
    allowed = {
        "size": (0, 2**50, ["Rational", 1, 2]),
        "hint": (2**50,),
        "time": (0, 1.5, 2**50),
        "args": (0,),
        "link": (1.5, 2**50),
    }
    if bomb is not True and bomb in allowed.get(place, ()):
        with contextlib.suppress(fxmem.PlanMismatch):
            fxmem.Plan.load(path)
    elif place != "budget" or bomb not in (None, 2**50):
        with pytest.raises(fxmem.PlanMismatch):
            fxmem.Plan.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, '{"a":' * 100_000, '{"format": ' + "9" * 5000 + "}", '{"format": NaN}', '{"format": 1e999}',
        '"\\ud800"', "null", '{"format": "fxmem-plan-1"}', "\ufeff{}",
    ],
    ids=range(9),
)  # fmt: skip
def test_text_that_is_no_plan(tmp_path, text):
    (tmp_path / "plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(fxmem.PlanMismatch):
        fxmem.Plan.load(tmp_path / "plan.json")


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fxmem.PlanMismatch):
        fxmem.Plan.load(tmp_path / "plan.json")


def test_repr_is_one_line(planned):
    plan = planned[2]
    for text in (repr(plan), repr(plan.program)):
        assert "\n" not in text
        assert len(text) < 160
        assert plan.program.fingerprint in text
    assert "by auto under" in repr(plan)


def test_pickled_and_copied(planned):
    plan = planned[2]
    assert plan.simulation
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert again.joint is None
    assert copy.deepcopy(plan).graph_module is plan.graph_module


def test_diff_says_what_changed(planned):
    module, args, plan = planned
    assert plan.diff(plan) == "the plans are the same"
    free = fxmem.plan(module, args)
    text = plan.diff(free)
    assert f"({plan.budget_bytes} bytes) -> none" in text
    assert "planner: auto -> none" in text
    assert "recomputed -> kept" in text
    assert "kept -> recomputed" in free.diff(plan)
    assert "different graphs" in plan.diff(fxmem.plan(Blocks(num_blocks=2), args))
