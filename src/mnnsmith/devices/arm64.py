"""Preparing the emulated ARM device: fetch its parts, put them together, prove it, keep it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mnnsmith.devices.fetch import Progress, check_mirror, fetch_packages, fetch_wheels
from mnnsmith.devices.unpack import unpack_deb, unpack_wheel
from mnnsmith.engine.emulated import (
    CPUS,
    WHEELS,
    EmulatedDevice,
    PinnedPackage,
    Pins,
    arm64_pins,
    check_host,
    devices_cache,
    launch_in,
)
from mnnsmith.engine.selftest import check_engine
from mnnsmith.errors import MissingResourceError

_REMEDY = "Prepare it again with -v; if it fails again, please report what is shown."
_DOWNLOADS, _LOCK, _ASIDE = "downloads", ".lock", "preparing-"


@dataclass(frozen=True)
class Prepared:
    """folder: where the device is.  seconds: that it took, 0 where it was there already."""

    folder: Path
    seconds: float = 0.0


def prepare_arm64(
    mirror: str | None = None, progress: Progress | None = None, pins: Pins | None = None
) -> Prepared:
    """Make `EmulatedDevice` usable; nothing is done where it is.

    It is put together aside and renamed when the engine has computed on every processor, so what
    is there is whole.  An interrupted call leaves the downloads that are complete.

    mirror: a Debian mirror in place of the pinned one.  progress: gets bytes as they come.

    Raises MissingResourceError when a part cannot be had or stored, SourceError when one is
    damaged, EngineError when the engine does not work, UnsupportedError on other machines.
    """
    check_host()
    parts = pins or arm64_pins()
    base = check_mirror(parts.mirror if mirror is None else mirror)
    began = time.monotonic()
    cache = devices_cache()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _alone(cache):
            if parts.folder.is_dir():
                return Prepared(parts.folder)
            _remove_leftovers(cache)
            _prepare(cache, parts, base, progress or (lambda _: None))
    except OSError as error:
        raise MissingResourceError(
            f"{cache}: cannot be written: {error.strerror or error}.",
            "Set XDG_CACHE_HOME to a folder with 500 MB of free space.",
        ) from error
    return Prepared(parts.folder, time.monotonic() - began)


def remove_arm64() -> int:
    """Remove the emulated device, of this and other versions: bytes of disk space freed.

    Raises MissingResourceError when that is not allowed.
    """
    cache = devices_cache()
    if not cache.is_dir():
        return 0
    freed = disk_bytes(cache)
    try:
        with _alone(cache):
            for entry in cache.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
    except OSError as error:
        raise MissingResourceError(
            f"{cache}: cannot be removed: {error.strerror}.", "Check its permissions."
        ) from error
    return freed


def arm64_bytes() -> int | None:
    """Disk space that the prepared device takes, None where it is not prepared."""
    folder = EmulatedDevice().folder
    return disk_bytes(folder) if folder.is_dir() else None


def disk_bytes(folder: Path) -> int:
    """Disk space of all files below a folder."""
    return sum(
        512 * os.lstat(os.path.join(parent, name)).st_blocks
        for parent, _, names in os.walk(folder)
        for name in names
    )


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Two at once would fetch everything twice: the second one waits, and finds it done."""
    with open(cache / _LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(cache: Path) -> None:
    """Of calls that were killed."""
    for folder in cache.glob(f"{_ASIDE}*"):
        shutil.rmtree(folder)


def _prepare(cache: Path, pins: Pins, mirror: str, progress: Progress) -> None:
    downloads = cache / _DOWNLOADS
    downloads.mkdir(exist_ok=True)
    packages = fetch_packages(pins, downloads, mirror, progress)
    wheels = fetch_wheels(pins, downloads)
    progress(sum(wheel.size_bytes for wheel in pins.wheels))
    aside = Path(tempfile.mkdtemp(prefix=_ASIDE, dir=cache))
    try:
        for file, package in zip(packages, pins.packages, strict=True):
            _unpack(file, package, aside)
        (aside / WHEELS).mkdir()
        for wheel in wheels:
            unpack_wheel(wheel, aside / WHEELS)
        for cpu in CPUS:
            # It also leaves compiled modules there, which halve the time of a start.
            check_engine(launch_in(aside, cpu), EmulatedDevice.time_factor, _REMEDY)
        os.replace(aside, pins.folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    shutil.rmtree(downloads)


def _unpack(file: Path, package: PinnedPackage, aside: Path) -> None:
    folder = aside / package.into
    folder.mkdir(exist_ok=True)
    unpack_deb(file, folder, lambda name: name.startswith(package.keep))
