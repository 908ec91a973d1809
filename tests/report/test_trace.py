"""Traces for Perfetto, snapshots for PyTorch's memory visualiser, what a notebook shows."""

import json
import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch.cuda import _memory_viz as memory_viz

import fxmem
from fxmem.planners.plan import judge
from fxmem.report.snapshot import write_snapshot
from fxmem.schedule import Compute, Recompute
from fxmem.testing import plans
from fxmem.units import format_bytes
from tests.models import blocks


@pytest.fixture(scope="module")
def plan():
    module, args = blocks()
    return fxmem.plan(module, args, budget=0.7)


def events_of(plan, folder):
    plan.trace(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_every_run_of_an_op_is_a_slice_of_the_compute_track(plan, tmp_path):
    events = events_of(plan, tmp_path)
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    ops = [e for e in events if e["ph"] == "X" and "again" in e["args"]]
    runs = [action for action in plan.actions if isinstance(action, (Compute, Recompute))]
    assert {e["tid"] for e in ops} == {tracks["compute"]}
    assert [e["args"]["again"] for e in ops] == [isinstance(action, Recompute) for action in runs]
    assert max(e["ts"] + e["dur"] for e in ops) == pytest.approx(plan.simulation.seconds * 1e6)


def test_slices_nest(plan, tmp_path):
    """On one track two slices are apart, or one holds the other; ops lie in their modules."""
    slices = [(e["ts"], e["ts"] + e["dur"], e) for e in events_of(plan, tmp_path) if e["ph"] == "X"]
    assert {e["name"] for *_, e in slices} >= {"forward", "backward", "again", "blocks.0", "blocks.0.1"}
    slack = 1e-6
    for first, last, event in slices:
        for other_first, other_last, other in slices:
            apart = last <= other_first + slack or other_last <= first + slack
            within = (first - slack <= other_first and other_last <= last + slack) or (
                other_first - slack <= first and last <= other_last + slack
            )
            assert apart or within, (event, other)
    modules = [(first, last, e["name"]) for first, last, e in slices if not e["args"]]
    for first, last, event in slices:
        module = event["args"].get("module")
        if module:
            assert any(a <= first + slack and last <= b + slack and name == module for a, b, name in modules)


def test_the_counter_peaks_where_the_plan_does(plan, tmp_path):
    counters = [e for e in events_of(plan, tmp_path) if e["ph"] == "C"]
    assert max(sum(e["args"].values()) for e in counters) == plan.peak_bytes
    assert all(a["ts"] <= b["ts"] for a, b in pairwise(counters))


def test_copies_have_tracks_of_their_own(tmp_path):
    module, args = blocks(batch=1024)
    made = fxmem.plan(module, args, "min", tiers="host", device_spec="h100-80g", planner="offload-all", solve_s=0.1)
    assert made.simulation.bytes_moved
    events = events_of(made, tmp_path)
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    moved = sum(e["args"]["bytes"] for e in events if e["ph"] == "X" and e["tid"] != tracks["compute"])
    assert set(tracks) == {"compute", "host out", "host in"}
    assert moved == made.simulation.bytes_moved


def peak_of(entries):
    level = peak = 0
    standing = {}
    for entry in entries:
        if entry["action"] == "alloc":
            for address, size in standing.items():
                assert entry["addr"] + entry["size"] <= address or address + size <= entry["addr"], "two in one place"
            standing[entry["addr"]] = entry["size"]
            level += entry["size"]
        elif entry["action"] == "free_completed":
            assert standing.pop(entry["addr"]) == entry["size"]
            level -= entry["size"]
        peak = max(peak, level)
    return peak


def test_the_snapshot_is_what_the_plan_foretells(plan, tmp_path):
    plan.memory_snapshot(tmp_path / "snap.pickle")
    data = pickle.loads((tmp_path / "snap.pickle").read_bytes())
    (entries,) = data["device_traces"]
    assert peak_of(entries) == plan.peak_bytes
    frames = [frame for entry in entries for frame in entry["frames"]]
    assert {"tests/models.py", ""} >= {frame["filename"] for frame in frames} > {""}
    assert any(frame["name"] == "blocks.0.1" and frame["line"] == 27 for frame in frames)


def test_pytorchs_visualiser_reads_it(plan, tmp_path):
    module, args = blocks()
    measured = fxmem.measure(lambda: module(*args).backward(), events=True)
    plan.memory_snapshot(tmp_path / "snap.pickle", measured.events)
    data = pickle.loads((tmp_path / "snap.pickle").read_bytes())
    assert "Active Memory Timeline" in memory_viz.trace_plot(data)
    assert "Allocator State History" in memory_viz.segment_plot(data)
    assert "segments: 2" in memory_viz.segsum(data)
    assert memory_viz.memory(data, format_flamegraph=lambda text: text).count("blocks.0.0.weight")
    assert "Device 1" in memory_viz.trace(data)
    assert peak_of(data["device_traces"][1]) == measured.peak_bytes


@settings(max_examples=20)
@given(plans())
def test_any_plan_has_a_snapshot(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("any") / "snap.pickle"
    write_snapshot(made, path)
    data = pickle.loads(path.read_bytes())
    assert peak_of(data["device_traces"][0]) == made.peak_bytes
    memory_viz.segsum(data)


def test_a_measurement_without_events_keeps_none():
    assert fxmem.measure(lambda: torch.ones(10)).events == ()


def test_a_notebook_shows_the_figures_and_a_terminal_one_line(plan):
    shown = plan._repr_html_()
    assert format_bytes(plan.peak_bytes) in shown
    assert len(shown) < 400_000
    assert len(repr(plan)) < 200
    assert "\n" not in repr(plan)
    assert judge(plan.program, plan.actions, "mine", None, plan.machine)._repr_html_()
