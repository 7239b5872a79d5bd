"""Mapped weights: the same logits, and no trap left by whatever happened before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mnnsmith.api import Engine, convert
from mnnsmith.engine import mapped
from tiny_mixture import write_mixture

pytestmark = pytest.mark.engine

IDS = list(range(5, 45))
# What is done in another process, which then waits to be killed.
OPENS = "import sys, time; from mnnsmith.engine import Engine, mapped\n"
WAITS = "print('ready', flush=True); time.sleep(60)\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    write_mixture(folder)
    return folder


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> Path:
    return convert(checkpoint, checkpoint.parent / "bundle", recipe="w4g32").path


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "bundle"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "cache" / "mnnsmith" / "mapped"


def work(engine: Engine) -> np.ndarray:
    """Logits of a prompt and of five steps."""
    parts = [engine.forward(IDS, all_positions=True)]
    parts += [engine.forward([i])[None] for i in IDS[:5]]
    return np.concatenate(parts)


def run(bundle: Path, **options: Any) -> tuple[np.ndarray, str]:
    with Engine(bundle, **options) as engine:
        return work(engine), engine.mapping.state


@pytest.fixture
def expected(bundle: Path) -> np.ndarray:
    return run(bundle, config={"use_mmap": False})[0]


def folders(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def killed(program: str, *arguments: str | Path) -> None:
    """Run a program in another process; kill it when it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", OPENS + program, *map(str, arguments)],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    engines = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()
    # They end with their owner, a moment later, and hold the locks until then.
    _, alive = psutil.wait_procs(engines, timeout=20)
    assert engines and not alive


# --- the way it should go -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["w4g32", "w8", "w8g32-sym", "w4g32-head8"])
def test_the_second_load_gives_the_same_bits(
    checkpoint: Path, tmp_path: Path, recipe: str, cache: Path
) -> None:
    bundle = convert(checkpoint, tmp_path / "bundle", recipe=recipe).path
    # Converting proves the bundle without writing its weights a second time.
    assert not cache.exists()
    plain, state = run(bundle, config={"use_mmap": False})
    assert state == "off"
    for state in ("new", "ready", "ready"):
        found = run(bundle)
        assert found[1] == state
        np.testing.assert_array_equal(found[0], plain)
    assert len(folders(cache)) == 1
    assert mapped.cache_bytes() > 0.9 * (bundle / "llm.mnn.weight").stat().st_size


def test_the_second_load_reads_no_weights(bundle: Path) -> None:
    run(bundle)
    # Same size and time: as the files of the cache are in place, nothing else is looked at.
    path = bundle / "llm.mnn.weight"
    status = path.stat()
    spared = path.read_bytes()[-4096:]
    path.write_bytes(b"\xff" * (status.st_size - 4096) + spared)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with Engine(bundle) as engine:
        assert engine.mapping.state == "ready"
        # Embeddings and routers are read from the bundle itself, so logits differ; they are there.
        assert engine.forward([5]).shape == (engine.vocab_size,)


def test_only_mixtures_in_integers_are_mapped(checkpoint: Path, made: Path, tmp_path: Path) -> None:
    assert json.loads((made / "config.json").read_text())["use_mmap"] is True
    for recipe in ("fp16", "w4g32-head16"):
        found = convert(checkpoint, tmp_path / recipe, recipe=recipe).path
        assert "use_mmap" not in json.loads((found / "config.json").read_text())


def test_floats_at_run_time_are_not_mapped(bundle: Path, cache: Path) -> None:
    for memory in ("normal", "high"):
        with Engine(bundle, memory=memory) as engine:
            assert engine.mapping.state == "off" and "memory" in str(engine.mapping.note)
    assert not cache.exists()


def test_each_setting_has_files_of_its_own(bundle: Path, expected: np.ndarray, cache: Path) -> None:
    assert run(bundle, threads=1)[1] == "new"
    found, state = run(bundle, threads=2)
    assert state == "new"
    np.testing.assert_array_equal(found, expected)
    assert run(bundle, threads=1)[1] == "ready"
    assert len(folders(cache)) == 2


# --- whatever happened before -------------------------------------------------------------------


def test_a_kill_before_the_first_load_ended(
    bundle: Path, expected: np.ndarray, cache: Path
) -> None:
    waits = f"mapped.MappedWeights.loaded = lambda self: exec({WAITS!r})\n"
    killed(f"{waits}Engine(sys.argv[1])", bundle)
    # What a kill at another moment could have left: the engine's own mark beside half of the rest.
    files = list(folders(cache)[0].glob("*.static"))
    assert len(files) == 2
    for path in files:
        with open(path, "r+b") as file:
            file.write(bytes(min(path.stat().st_size, 1 << 20)))
    for state in ("new", "ready"):
        found = run(bundle)
        assert found[1] == state
        np.testing.assert_array_equal(found[0], expected)


def test_a_kill_while_files_are_written(bundle: Path, expected: np.ndarray, cache: Path) -> None:
    for delay_s in (0.0, 0.02, 0.05):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{OPENS}Engine(sys.argv[1])\n{WAITS}", str(bundle)],
            stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not any(cache.glob("*/*.static")) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(delay_s)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        found, _ = run(bundle)
        np.testing.assert_array_equal(found, expected)
        mapped.clear_cache()


def test_two_engines_at_once(bundle: Path, expected: np.ndarray, cache: Path) -> None:
    for _ in range(2):
        with Engine(bundle) as first, Engine(bundle) as second:
            assert (second.mapping.state, len(folders(cache))) == ("private", 2)
            np.testing.assert_array_equal(work(first), expected)
            np.testing.assert_array_equal(work(second), expected)
        assert len(folders(cache)) == 1
    # The lock went with the first one.
    assert run(bundle)[1] == "ready"


def test_a_killed_owner_leaves_no_lock(bundle: Path, cache: Path) -> None:
    run(bundle)
    killed(f"first = Engine(sys.argv[1]); second = Engine(sys.argv[1])\n{WAITS}", bundle)
    assert run(bundle)[1] == "ready"
    assert len(folders(cache)) == 1


def test_a_changed_bundle(checkpoint: Path, bundle: Path, tmp_path: Path, cache: Path) -> None:
    run(bundle)
    write_mixture(tmp_path / "other", seed=7)
    convert(tmp_path / "other", bundle, recipe="w4g32", force=True)
    plain, _ = run(bundle, config={"use_mmap": False})
    for state in ("new", "ready"):
        found = run(bundle)
        assert found[1] == state
        np.testing.assert_array_equal(found[0], plain)
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("harm", ["cut", "gone", "mark"])
def test_files_that_were_tampered_with(
    bundle: Path, expected: np.ndarray, cache: Path, harm: str
) -> None:
    run(bundle)
    folder = folders(cache)[0]
    largest = max(folder.glob("*.static"), key=lambda path: path.stat().st_size)
    if harm == "cut":
        os.truncate(largest, 4096)
    elif harm == "gone":
        largest.unlink()
    else:
        (folder / "complete.json").write_text('{"files": [')
    found, state = run(bundle)
    assert state == "new"
    np.testing.assert_array_equal(found, expected)


def test_a_bundle_that_must_not_be_mapped_falls_back(checkpoint: Path, tmp_path: Path) -> None:
    """As config.json edited by hand, or another exporter's bundle: the second load crashes."""
    bundle = convert(checkpoint, tmp_path / "floats", recipe="fp16").path
    plain, _ = run(bundle)
    path = bundle / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_mmap": True}))
    for state in ("new", "off", "off"):
        found = run(bundle)
        assert found[1] == state
        np.testing.assert_array_equal(found[0], plain)


def test_files_of_bundles_that_are_gone_are_removed(
    made: Path, bundle: Path, tmp_path: Path, cache: Path
) -> None:
    run(bundle)
    shutil.rmtree(bundle)
    other = shutil.copytree(made, tmp_path / "another")
    assert run(other)[1] == "new"
    assert len(folders(cache)) == 1


def test_no_room(bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(bundle)._replace(free=1000)
    monkeypatch.setattr(mapped.shutil, "disk_usage", lambda path: usage)
    with Engine(bundle) as engine:
        assert engine.mapping.state == "off" and "disk" in str(engine.mapping.note)
    assert folders(cache) == []


def test_a_cache_that_cannot_be_written(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with Engine(bundle) as engine:
        assert engine.mapping.state == "off" and "cache" in str(engine.mapping.note)


def test_clearing(bundle: Path, cache: Path) -> None:
    with Engine(bundle):
        assert mapped.clear_cache() == (0, 1)
    freed, in_use = mapped.clear_cache()
    assert freed > 100_000 and in_use == 0
    assert list(cache.iterdir()) == []
    assert run(bundle)[1] == "new"


def test_doctor_shows_and_clears(bundle: Path, cache: Path) -> None:
    from typer.testing import CliRunner

    from mnnsmith.cli.main import app

    def doctor(*options: str) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["doctor", "--no-self-test", "--json", *options])
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)["mapped_weights"]
        return found

    assert doctor() == {"path": str(cache), "bytes": 0}
    with Engine(bundle):
        size = doctor()["bytes"]
        assert size > 100_000
        kept = doctor("--clear-cache")
        assert kept == {"path": str(cache), "bytes": size, "freed_bytes": 0, "in_use": 1}
    assert doctor("--clear-cache")["freed_bytes"] == size
    assert doctor()["bytes"] == 0


@pytest.mark.parametrize("recipe", ["w8g32", "w4g32"])
def test_low_memory_stays_near_high(checkpoint: Path, tmp_path: Path, recipe: str) -> None:
    """Integers at run time cost a little; one, two and four threads give the same."""
    bundle = convert(checkpoint, tmp_path / "bundle", recipe=recipe).path
    exact, _ = run(bundle, memory="high")
    low = [run(bundle, memory="low", threads=threads)[0] for threads in (1, 2, 4)]
    assert np.isfinite(low).all()
    np.testing.assert_allclose(low[1:], [low[0]] * 2, atol=1e-4 * exact.std())
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (exact, low[0]))
    # A changed choice of experts moves a token far; most keep theirs.
    assert np.median((np.exp(p) * (p - q)).sum(-1)) < 0.1


def test_the_engines_own_rule_for_apps(bundle: Path, made: Path, tmp_path: Path) -> None:
    """Without `tmp_path` the engine maps nothing; with one, integer weights load again and again.

    Floats in a linear layer, or `memory` other than low, crash the second load; when this fails,
    the engine has learned it, and the rules here may go.
    """
    outcomes = {}
    for name, recipe, settings in (
        ("no path", "w4g32", {}),
        ("integers", "w4g32", {"tmp_path": str(tmp_path / "a")}),
        ("floats", "fp16", {"tmp_path": str(tmp_path / "b")}),
        ("normal", "w4g32", {"tmp_path": str(tmp_path / "c"), "memory": "normal"}),
    ):
        source = made
        if recipe == "fp16":
            source = convert(made.parent / "model", tmp_path / "fp16", recipe=recipe).path
        os.makedirs(settings.get("tmp_path", tmp_path), exist_ok=True)
        outcomes[name] = [_as_an_app(source, settings, tmp_path) for _ in range(2)]
    assert outcomes["no path"] == outcomes["integers"] == [0, 0]
    assert not list(tmp_path.glob("*.static"))
    assert list((tmp_path / "a").glob("*.static"))
    for name in ("floats", "normal"):
        first, second = outcomes[name]
        assert first == 0 and second != 0


def _as_an_app(bundle: Path, settings: dict[str, Any], cwd: Path) -> int:
    """Load and run a bundle by the engine's own interface; gives the exit status."""
    program = """
import json, os, sys
import MNN.llm
llm = MNN.llm.create(sys.argv[1] + "/config.json")._c_obj
llm.set_config(sys.argv[2])
assert llm.load()
logits = llm.forward([5, 6, 7])
assert sum(logits.read().flatten()) != 0
del logits
os._exit(0)
"""
    config = json.dumps({"use_mmap": True, **settings})
    command = [sys.executable, "-c", program, str(bundle), config]
    return subprocess.run(command, cwd=cwd, capture_output=True, timeout=120).returncode
