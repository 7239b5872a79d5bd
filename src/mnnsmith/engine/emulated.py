"""MNN's ARM kernels on an x86-64 machine: its aarch64 build under user-mode emulation.

QEMU runs the arm64 Python of a small Debian userland, which loads the aarch64 wheels of MNN and
numpy.  Neither root nor a chroot is needed: `-L` has the emulator look for a path in the userland
first, and then where it is, so bundles and the runner are read in place.  What the parts are,
where they come from and their hashes stand in `arm64.json`; `mnnsmith.devices` puts them together.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from mnnsmith.engine.device import RUNNER, Launch
from mnnsmith.engine.machine import cache_home
from mnnsmith.errors import MissingResourceError, UnsupportedError, UsageError

PINS_FILE = Path(__file__).with_name("arm64.json")
# Processors that the emulator knows, and what MNN 3.6.1 finds on them; by its own log.
CPUS = {
    "max": "fp16, int8 dot product, i8mm, SVE2: as phones of 2022 and later",
    "cortex-a76": "fp16, int8 dot product: as phones of 2019",
    "cortex-a53": "neither of them: as phones of 2014",
}
DEFAULT_CPU = "max"
# Below the folder of the prepared device.
EMULATOR = Path("emulator/usr/bin/qemu-aarch64-static")
SYSTEM = Path("system")
WHEELS = Path("wheels")
PREPARE_COMMAND = "mnnsmith devices prepare arm64"


@dataclass(frozen=True)
class PinnedPackage:
    """A Debian package: its path on a mirror, and which of its paths are unpacked `into` what."""

    path: str
    size_bytes: int
    sha256: str
    into: str
    keep: tuple[str, ...]

    @property
    def file_name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class PinnedWheel:
    """A Python wheel: what pip is asked for."""

    requirement: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Pins:
    """All parts of the emulated device.

    elsewhere: mirrors that keep packages which the first one has dropped.
    digest: of all of this; another version of a part is another device.
    """

    mirror: str
    elsewhere: tuple[str, ...]
    python_version: str
    platforms: tuple[str, ...]
    packages: tuple[PinnedPackage, ...]
    wheels: tuple[PinnedWheel, ...]
    digest: str

    @property
    def download_bytes(self) -> int:
        packages = sum(package.size_bytes for package in self.packages)
        return packages + sum(wheel.size_bytes for wheel in self.wheels)

    @property
    def folder(self) -> Path:
        """Where the device is, once it is prepared: whole, or not there."""
        return devices_cache() / f"arm64-{self.digest[:12]}"


def devices_cache() -> Path:
    """The folder of all prepared devices."""
    return cache_home() / "devices"


@cache
def arm64_pins() -> Pins:
    """The parts that this version of mnnsmith names."""
    return read_pins(PINS_FILE)


def read_pins(path: Path) -> Pins:
    """The parts that a file of ours lists."""
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data)
    packages = tuple(
        PinnedPackage(**{**entry, "keep": tuple(entry["keep"])}) for entry in found["packages"]
    )
    return Pins(
        mirror=found["mirror"],
        elsewhere=tuple(found["elsewhere"]),
        python_version=found["python_version"],
        platforms=tuple(found["platforms"]),
        packages=packages,
        wheels=tuple(PinnedWheel(**entry) for entry in found["wheels"]),
        digest=hashlib.sha256(data).hexdigest(),
    )


@dataclass(frozen=True)
class EmulatedDevice:
    """An emulated ARM processor; the same files as here.

    Raises UsageError for a processor that is none of `CPUS`.
    """

    cpu: str = DEFAULT_CPU
    pins: Pins | None = None

    # A token takes about a hundred times as long (135M parameters, two cores); the limits are wide.
    time_factor: ClassVar[float] = 50.0
    maps_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.cpu not in CPUS:
            raise UsageError(
                f"arm64:{self.cpu:.80}: there is no such processor here.",
                f"Choose one of: {', '.join(CPUS)}.",
            )

    @property
    def name(self) -> str:
        return f"arm64:{self.cpu}"

    @property
    def folder(self) -> Path:
        return (self.pins or arm64_pins()).folder

    def launch(self, script: Path = RUNNER) -> Launch:
        check_host()
        if not self.folder.is_dir():
            raise MissingResourceError(
                f"{self.name}: the emulated device is not prepared.",
                f"Prepare it, once: {PREPARE_COMMAND}",
            )
        return launch_in(self.folder, self.cpu, script)

    def send(self, bundle: Path) -> str:
        return str(bundle)


def check_host() -> None:
    """Raises UnsupportedError where the emulator's build does not run."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        hint = "This machine has ARM kernels of its own: use the device local."
        raise UnsupportedError(
            f"arm64: emulation needs Linux on x86-64, found {system} on {machine}.",
            hint if machine in ("aarch64", "arm64") else None,
        )


def launch_in(folder: Path, cpu: str, script: Path = RUNNER) -> Launch:
    """Start a runner on the device that lies in `folder`."""
    system = folder / SYSTEM
    command = (
        str(folder / EMULATOR),
        *("-cpu", cpu, "-L", str(system)),
        str(system / "usr/bin/python3.11"),
        str(script),
    )
    # Nothing of our own: a library or a module that it names would be of the wrong machine.
    environment = {
        "PYTHONHOME": str(system / "usr"),
        "PYTHONPATH": str(folder / WHEELS),
        "PYTHONNOUSERSITE": "1",
        "LC_ALL": "C.UTF-8",
    }
    return Launch(command, environment)
