"""`mnnsmith devices`, and what doctor says of devices.  Nothing is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mnnsmith.cli.main import app
from mnnsmith.devices import arm64
from mnnsmith.devices.fetch import Progress
from mnnsmith.engine.emulated import CPUS, arm64_pins

NAMES = ["local", *(f"arm64:{cpu}" for cpu in CPUS)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return tmp_path / "mnnsmith/devices"


def devices(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["devices", *arguments])


def states() -> dict[str, dict[str, Any]]:
    return {state["name"]: state for state in json.loads(devices("--json").stdout)["devices"]}


def test_what_is_missing_and_how_to_get_it(cache: Path) -> None:
    found = states()
    assert list(found) == NAMES and found["local"]["ready"]
    for name in NAMES[1:]:
        assert not found[name]["ready"] and found[name]["missing"] == "not prepared"
        assert found[name]["remedy"] == "mnnsmith devices prepare arm64"
        assert found[name]["download_bytes"] == arm64_pins().download_bytes
    text = devices().stdout
    assert "MB to download" in text and "mnnsmith devices prepare arm64" in text
    assert not cache.exists()


def test_prepared_and_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(mirror: str | None, progress: Progress) -> arm64.Prepared:
        assert mirror == "http://somewhere/debian"
        progress(100)
        folder = arm64_pins().folder
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(5000))
        return arm64.Prepared(folder, 3.0)

    monkeypatch.setattr(arm64, "prepare_arm64", prepare)
    monkeypatch.setenv("MNNSMITH_DEBIAN_MIRROR", "http://somewhere/debian")
    done = devices("prepare", "arm64", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["disk_bytes"] >= 5000
    assert all(states()[name]["ready"] for name in NAMES)
    assert "mnnsmith devices remove arm64" in devices().stdout
    assert json.loads(devices("remove", "arm64", "--json").stdout)["freed_bytes"] >= 5000
    assert not states()["arm64:max"]["ready"]


def test_on_an_arm_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = states()
    assert not found["arm64:max"]["ready"] and found["arm64:max"]["remedy"] is None
    assert "needs Linux on x86-64" in devices().stdout
    assert devices("prepare", "arm64").exit_code == 4


@pytest.mark.parametrize(
    "arguments", [["prepare"], ["install", "arm64"], ["prepare", "local"], ["remove", "arm64:max"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    done = devices(*arguments)
    assert done.exit_code == 2 and done.stdout == ""


def test_doctor_tells() -> None:
    done = CliRunner().invoke(app, ["doctor", "--no-self-test", "--json"])
    report = json.loads(done.stdout)
    assert report["devices"] == dict.fromkeys(NAMES, "not prepared") | {"local": "ready"}
    [finding] = [f for f in report["findings"] if "arm64:cortex-a76" in f["problem"]]
    assert finding["remedy"] == "mnnsmith devices prepare arm64" and "MB" in finding["problem"]
