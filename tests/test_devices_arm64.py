"""Preparing the emulated device from a stand-in mirror, and what an engine on it does.

The stand-in's "emulator" is a shell script that runs our own Python; all else is the real thing:
packages over HTTP, wheels through pip, unpacking, the proof, the engine through the device.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from deb_samples import deb_of, tar, write_wheel
from mnnsmith.devices import arm64
from mnnsmith.devices.arm64 import prepare_arm64, remove_arm64
from mnnsmith.engine import Engine, parse_device
from mnnsmith.engine.device import Launch, LocalDevice
from mnnsmith.engine.emulated import CPUS, EmulatedDevice, Pins, arm64_pins, read_pins
from mnnsmith.errors import (
    EngineError,
    MissingResourceError,
    SourceError,
    UnsupportedError,
    UsageError,
)
from tiny_bundle import TinyLlama

engine = pytest.mark.engine
Tiny = tuple[Path, TinyLlama]

# Its arguments: -cpu NAME -L SYSTEM PYTHON RUNNER
EMULATOR = f"""#!/bin/sh
[ -x "$5" ] && [ -d "$PYTHONHOME" ] && [ -f "$PYTHONPATH/tiny_part/__init__.py" ] || exit 3
echo "$2" >> "$4/../started"
unset PYTHONHOME PYTHONPATH
exec '{sys.executable}' "$6"
"""
SYSTEM = tar(("usr/bin/python3.11", b"an ARM program", 0o755), ("usr/share/doc/x", b"y", 0o644))


@dataclass
class Mirror:
    """status: of every answer that is not 200.  asked: paths, in order."""

    folder: Path
    url: str = ""
    other_url: str = ""
    asked: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    status: int = 404


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Mirror]:
    """Two mirrors below one address; the second has what is gone from the first."""
    found = Mirror(tmp_path / "mirror")
    found.folder.mkdir()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            _, base, *_, name = self.path.split("/")
            if name in found.gone and base != "second":
                self.send_error(found.status)
                return
            data = (found.folder / name).read_bytes()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if name in found.cut else data)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}/first"
    found.other_url = f"http://127.0.0.1:{server.server_port}/second"
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def write_pins(mirror: Mirror, tmp_path: Path, emulator: bytes, system: bytes) -> Pins:
    packages = []
    for name, data, into, keep in (
        ("qemu_1%3a7.deb", deb_of(tar(("./usr/bin/qemu-aarch64-static", emulator, 0o755),
                                      ("./usr/bin/qemu-other", b"z", 0o755))),
         "emulator", ["usr/bin/qemu-aarch64-static"]),
        ("system_1+2.deb", deb_of(system), "system", ["usr/bin/"]),
    ):  # fmt: skip
        # As the address is quoted, so is the name that the server sees.
        (mirror.folder / name.replace("%", "%25").replace("+", "%2B")).write_bytes(data)
        packages.append({
            "path": f"pool/main/{name}", "size_bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(), "into": into, "keep": keep,
        })  # fmt: skip
    index = tmp_path / "index"
    index.mkdir(exist_ok=True)
    wheel = write_wheel(index, "tiny_part", "1.0", {"tiny_part/__init__.py": b""})
    pins = {
        "mirror": mirror.url, "elsewhere": [mirror.other_url],
        "python_version": "3.11", "platforms": ["manylinux2014_aarch64"], "packages": packages,
        "wheels": [{
            "requirement": "tiny-part==1.0", "size_bytes": wheel.stat().st_size,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        }],
    }  # fmt: skip
    file = tmp_path / "pins.json"
    file.write_text(json.dumps(pins))
    return read_pins(file)


@pytest.fixture
def pins(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pins:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return write_pins(mirror, tmp_path, EMULATOR.encode(), SYSTEM)


def left(tmp_path: Path) -> list[str]:
    """What the cache of devices holds, but for the lock."""
    return sorted(p.name for p in (tmp_path / "cache/mnnsmith/devices").iterdir() if p.is_dir())


@engine
def test_prepared_once_and_used(
    pins: Pins, mirror: Mirror, tmp_path: Path, tiny_bundle: Tiny
) -> None:
    device = EmulatedDevice("cortex-a76", pins)
    with pytest.raises(MissingResourceError, match="not prepared") as caught:
        Engine(tiny_bundle[0], device=device)
    assert caught.value.hint is not None and "mnnsmith devices prepare arm64" in caught.value.hint
    assert mirror.asked == [] and not (tmp_path / "cache").exists()

    came: list[int] = []
    prepared = prepare_arm64(progress=came.append, pins=pins)
    assert prepared.folder == pins.folder == device.folder and prepared.seconds > 0
    assert sum(came) == pins.download_bytes and len(mirror.asked) == 2
    assert left(tmp_path) == [pins.folder.name]
    files = {str(p.relative_to(pins.folder)) for p in pins.folder.rglob("*") if p.is_file()}
    assert {"emulator/usr/bin/qemu-aarch64-static", "system/usr/bin/python3.11"} <= files
    assert not {f for f in files if "share" in f or "other" in f}
    assert (pins.folder / "started").read_text().split() == list(CPUS)

    again = prepare_arm64(pins=pins)
    assert again.folder == prepared.folder and again.seconds == 0 and len(mirror.asked) == 2

    ids = [5, 9, 100, 7]
    with Engine(tiny_bundle[0], device=device, memory="high", call_timeout_s=2) as found:
        logits = found.forward(ids, all_positions=True)
        assert found._call_timeout_s == 2 * device.time_factor and found.device == device
        assert found.mapping.state == "off"
    expected = tiny_bundle[1].logits(ids)
    assert np.abs(logits - expected).max() < 1e-3 * expected.std()
    assert (pins.folder / "started").read_text().split() == [*CPUS, "cortex-a76"]
    for config in ({"use_mmap": True}, {"tmp_path": "/tmp"}):
        with pytest.raises(UsageError, match="arm64:cortex-a76"):
            Engine(tiny_bundle[0], device=device, config=config)

    assert remove_arm64() > 0 and left(tmp_path) == [] and remove_arm64() == 0
    with pytest.raises(MissingResourceError):
        device.launch()


@engine
def test_what_was_fetched_is_not_fetched_again(
    pins: Pins, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(arm64, "check_engine", broken)
        with pytest.raises(KeyboardInterrupt):
            prepare_arm64(pins=pins)
    assert left(tmp_path) == ["downloads"] and len(mirror.asked) == 2
    # Killed at the worst moment, it leaves this; and a disk may damage what was fetched.
    (tmp_path / "cache/mnnsmith/devices/preparing-killed/system").mkdir(parents=True)
    (tmp_path / "cache/mnnsmith/devices/downloads/system_1+2.deb").write_bytes(b"damaged")
    prepare_arm64(pins=pins)
    assert [path.rpartition("/")[2] for path in mirror.asked[2:]] == ["system_1%2B2.deb"]
    assert left(tmp_path) == [pins.folder.name]


def test_a_package_that_is_gone_comes_from_elsewhere(
    pins: Pins, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm64, "check_engine", lambda *_: None)
    mirror.gone = {"qemu_1%253a7.deb"}
    prepare_arm64(pins=pins)
    assert [path.split("/")[1] for path in mirror.asked] == ["first", "second", "first"]


def test_a_package_that_is_gone_everywhere(pins: Pins, mirror: Mirror, tmp_path: Path) -> None:
    (mirror.folder / "system_1%2B2.deb").unlink()
    mirror.gone = {"system_1%2B2.deb"}
    with pytest.raises(MissingResourceError, match=r"system_1\+2\.deb.*no longer on") as caught:
        prepare_arm64(mirror.url, pins=Pins(**{**vars(pins), "elsewhere": ()}))
    assert caught.value.hint is not None and "--mirror" in caught.value.hint
    mirror.status = 503
    with pytest.raises(MissingResourceError, match="503"):
        prepare_arm64(pins=pins)
    assert left(tmp_path) == ["downloads"]


@pytest.mark.parametrize("fault", ["changed", "longer", "cut"])
def test_a_wrong_download_is_never_unpacked(
    pins: Pins, mirror: Mirror, tmp_path: Path, fault: str
) -> None:
    file = mirror.folder / "system_1%2B2.deb"
    data = file.read_bytes()
    if fault == "cut":
        mirror.cut = {file.name}
    else:
        file.write_bytes(data + b"x" if fault == "longer" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(MissingResourceError, match=r"system_1%2B2.*sha256"):
        prepare_arm64(pins=pins)
    assert left(tmp_path) == ["downloads"]
    downloads = (tmp_path / "cache/mnnsmith/devices/downloads").iterdir()
    assert [path.name for path in downloads] == ["qemu_1%3a7.deb"]


def test_no_mirror_and_no_wheel(pins: Pins, mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(MissingResourceError, match=r"127\.0\.0\.1:9"):
        prepare_arm64("http://127.0.0.1:9", pins=pins)
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(MissingResourceError, match=r"tiny-part==1\.0"):
        prepare_arm64(pins=pins)
    assert left(tmp_path) == ["downloads"]


@pytest.mark.parametrize("address", ["file:///etc", "ftp://x/y", "/debian", "https://", "", "-x"])
def test_what_is_no_mirror(pins: Pins, address: str) -> None:
    with pytest.raises(UsageError, match="mirror"):
        prepare_arm64(address, pins=pins)


@engine
@pytest.mark.parametrize(
    ("emulator", "message"),
    [(b"#!/bin/sh\necho it cannot be >&2\nexit 4\n", "it cannot be"), (b"no program", "started")],
)
def test_a_device_that_does_not_work_is_not_kept(
    pins: Pins, mirror: Mirror, tmp_path: Path, emulator: bytes, message: str
) -> None:
    broken = write_pins(mirror, tmp_path, emulator, SYSTEM)
    with pytest.raises(EngineError, match=message) as caught:
        prepare_arm64(pins=broken)
    assert caught.value.hint is not None and "Prepare it again" in caught.value.hint
    assert left(tmp_path) == ["downloads"]


def test_a_hostile_package_is_not_kept(pins: Pins, mirror: Mirror, tmp_path: Path) -> None:
    hostile = tar(("usr/bin/../../../../evil", b"x", 0o755))
    bad = write_pins(mirror, tmp_path, EMULATOR.encode(), hostile)
    with pytest.raises(SourceError, match="no plain path"):
        prepare_arm64(pins=bad)
    assert left(tmp_path) == ["downloads"] and not list(tmp_path.rglob("evil"))


def test_a_full_disk(pins: Pins, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(MissingResourceError, match="cannot be written"):
        prepare_arm64(pins=pins)


def test_other_machines(monkeypatch: pytest.MonkeyPatch, pins: Pins) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UnsupportedError, match="aarch64") as caught:
        prepare_arm64(pins=pins)
    assert caught.value.hint is not None and "local" in caught.value.hint
    with pytest.raises(UnsupportedError):
        EmulatedDevice("max", pins).launch()


def test_pins_are_whole() -> None:
    pins = arm64_pins()
    assert len({package.path for package in pins.packages}) == len(pins.packages)
    for part in (*pins.packages, *pins.wheels):
        assert len(part.sha256) == 64 and int(part.sha256, 16) and part.size_bytes > 1000
    requirements = {wheel.requirement.partition("==")[0] for wheel in pins.wheels}
    assert requirements == {"MNN", "numpy"}
    # The engine that everything else is measured with.
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{pins.wheels[0].requirement}"' in text


def test_devices_by_name() -> None:
    assert parse_device("local") == LocalDevice()
    assert parse_device("arm64") == parse_device("arm64:max") == EmulatedDevice("max")
    for text in ("arm64:max", "arm64:cortex-a76", "arm64:cortex-a53", "local"):
        assert parse_device(text).name == text
    assert LocalDevice().launch() == Launch((sys.executable, LocalDevice().launch().command[1]))


@pytest.mark.parametrize(
    "text",
    ["", "arm", "arm64:", "arm64:cortex-x99", "arm64:-L", "ARM64", "local:1", " local", "x:"],
)
def test_what_names_no_device(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_device(text)
    assert caught.value.hint is not None
