"""Case 6: a full disk, a kill or an interrupt leaves no half bundle, and the old one intact."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_checkpoint as tiny
from mnnsmith.api import Engine, convert, open_bundle, prepare
from mnnsmith.conversion import convert as conversion
from mnnsmith.errors import MissingResourceError, MnnsmithError

pytestmark = pytest.mark.engine

STAGES = ("tokenizer", "weights", "graph", "proof")
# Converts, and stops for good in the middle of a stage after saying so.
CHILD = """
import sys, time
from mnnsmith.api import convert

def progress(stage, done, total):
    if stage == sys.argv[3]:
        print("there", flush=True)
        time.sleep(60)

convert(sys.argv[1], sys.argv[2], recipe="w8g32", force=True, progress=progress)
"""


def fingerprint(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    tiny.write_checkpoint(folder)
    return folder


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_an_ended_conversion_leaves_the_old_bundle(
    model: Path, tmp_path: Path, stage: str, end: signal.Signals
) -> None:
    target = tmp_path / "bundle"
    convert(model, target, recipe="fp16")
    before = fingerprint(target)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(model), str(target), stage],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "there\n"
    assert len(os.listdir(tmp_path)) == 3, "the bundle, the new folder and its lock"
    child.send_signal(end)
    _, errors = child.communicate(timeout=30)
    if end is signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        assert os.listdir(tmp_path) == ["bundle"]
    else:
        assert child.returncode == -signal.SIGKILL
    assert fingerprint(target) == before
    with Engine(target) as engine:
        engine.forward([1, 2, 3])
    # What a killed one left goes with the next run, even one that fails.
    with pytest.raises(MnnsmithError):
        convert(model, target, recipe="fp16", force=True, max_context=100, threads=-1)
    convert(model, target, recipe="w8g32", force=True)
    assert os.listdir(tmp_path) == ["bundle"]
    assert open_bundle(target).manifest.recipe == "w8g32"


def test_a_running_conversion_is_not_taken_for_a_dead_one(model: Path, tmp_path: Path) -> None:
    """Two at once to one place: the second neither disturbs the first nor is disturbed."""
    target = tmp_path / "bundle"
    inner: list[str] = []

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "graph" and not inner:
            inner.append(stage)
            convert(model, target, recipe="w8g32", force=True)
            assert open_bundle(target).manifest.recipe == "w8g32"

    convert(model, target, recipe="fp16", force=True, progress=progress)
    assert inner and open_bundle(target).manifest.recipe == "fp16"
    assert os.listdir(tmp_path) == ["bundle"]


def test_disk_space_is_checked_before_any_work(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = prepare(model, recipe="fp16").bundle_bytes + (16 << 20)
    usage = type("Usage", (), {"free": needed - 1})
    monkeypatch.setattr("mnnsmith.bundle.staging.shutil.disk_usage", lambda _: usage)
    stages: list[str] = []
    with pytest.raises(MissingResourceError, match=r"needs 17 MB, the disk has 17 MB free"):
        convert(
            model, tmp_path / "out", recipe="fp16", progress=lambda stage, *_: stages.append(stage)
        )
    assert not stages and os.listdir(tmp_path) == []


@pytest.fixture
def limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Bytes that a file may have: the engine's tokenizer fails, tokenizer.json, the weights.
@pytest.mark.parametrize("nbytes", [100, 3000, 6000, 50_000])
def test_a_file_that_may_not_grow(model: Path, tmp_path: Path, limit: None, nbytes: int) -> None:
    target = tmp_path / "bundle"
    convert(model, target, recipe="fp16")
    before = fingerprint(target)
    sizes = sorted(f.stat().st_size for f in target.iterdir())
    assert sizes[-1] > 50_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
    with pytest.raises(MissingResourceError, match="File too large"):
        convert(model, target, recipe="fp32", force=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert fingerprint(target) == before and os.listdir(tmp_path) == ["bundle"]


def mount(folder: Path, kib: int) -> str | None:
    """Mount a small disk; a reason if that is not allowed."""
    folder.mkdir(exist_ok=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(options, capture_output=True, text=True)
    except FileNotFoundError:
        return "there is no mount command"
    return done.stderr.strip() or "failed" if done.returncode else None


def test_a_disk_that_fills_up(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every size, from nothing to enough: all or nothing, at whatever file the space ends."""
    # Else the check beforehand would refuse them all.
    monkeypatch.setattr(conversion, "_SMALL_FILES_BYTES", -(1 << 40))
    disk = tmp_path / "disk"
    sizes = [4, 8, 12, 20, 28, 200, 300, 340, 350, 360, 370, 380, 400, 440, 520, 1024]
    outcomes = []
    for kib in sizes:
        if reason := mount(disk, kib):
            pytest.skip(f"a small disk cannot be mounted here: {reason}")
        try:
            convert(model, disk / "bundle", recipe="fp16")
            outcomes.append(True)
            with Engine(disk / "bundle") as engine:
                engine.forward([1, 2])
            assert os.listdir(disk) == ["bundle"]
        except MnnsmithError as error:
            assert isinstance(error, MissingResourceError), f"{kib} KiB: {error}"
            outcomes.append(False)
            assert os.listdir(disk) == [], f"{kib} KiB"
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    assert outcomes == sorted(outcomes) and outcomes[-1] and not outcomes[5]
