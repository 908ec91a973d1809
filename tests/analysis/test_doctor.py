"""The doctor: bounded measurements, cached, nothing left behind."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fxmem.analysis import doctor
from fxmem.analysis.devices import PLANNING_FACTOR, device_spec
from fxmem.errors import OffloadError, OptionError


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_DISK_BYTES", doctor._CHUNK_BYTES)
    monkeypatch.setattr(doctor, "_COPY_BYTES", 1 << 16)


def test_examination_is_json_and_leaves_no_file(tmp_path: Path) -> None:
    directory = tmp_path / "offload"
    directory.mkdir()
    found = doctor.examine(directory)
    assert list(directory.iterdir()) == []
    data = json.loads(json.dumps(asdict(found)))
    assert data["disk_link"]["out_bytes_per_s"] > 0
    assert data["devices"][0]["memory_bytes"] > 0
    assert data["disk_free_bytes"] > 0


def test_bandwidths_are_measured_once_unless_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []
    original = doctor._measure_disk
    monkeypatch.setattr(doctor, "_measure_disk", lambda d: (calls.append(d), original(d))[1])
    first = doctor.examine(tmp_path)
    assert doctor.examine(tmp_path).disk_link == first.disk_link
    assert len(calls) == 1
    doctor.examine(tmp_path, refresh=True)
    assert len(calls) == 2


@pytest.mark.parametrize("text", ["{", '{"link": 3}', '{"link": {"out_bytes_per_s": 0}, "direct": true}'])
def test_a_damaged_cache_is_measured_again(tmp_path: Path, cache_directory: Path, text: str) -> None:
    doctor.examine(tmp_path)
    for file in cache_directory.iterdir():
        file.write_text(text)
    found = doctor.examine(tmp_path)
    assert found.disk_link.in_bytes_per_s > 0 < found.devices[0].host_link.out_bytes_per_s


def test_the_machine_plans_with_less_than_nominal(tmp_path: Path) -> None:
    nominal = doctor.examine(tmp_path).disk_link
    links = doctor.machine(("host", "disk"), tmp_path).links
    assert set(links) == {"host", "disk"}
    assert links["disk"].out_bytes_per_s == pytest.approx(nominal.out_bytes_per_s * PLANNING_FACTOR)
    assert doctor.machine(()).links == {}
    assert doctor.machine(("host",), None, "h200").links == device_spec("h200").machine(("host",)).links
    with pytest.raises(OptionError, match="h200"):
        doctor.machine(("host",), None, "nothing")


def test_a_full_or_missing_directory_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffloadError, match="missing"):
        doctor.machine(("disk",), tmp_path / "missing")
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(OffloadError, match="no room"):
        doctor.machine(("disk",), tmp_path)
