"""Bringing the pinned parts of a device here: Debian packages over HTTP, wheels through pip."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

from mnnsmith.engine.emulated import PinnedPackage, Pins
from mnnsmith.errors import MissingResourceError, UsageError
from mnnsmith.files import sha256_of

_BLOCK_BYTES = 1 << 18
_SILENCE_S = 60.0
_PIP_TIMEOUT_S = 1800.0
_GONE = (404, 410)
_HINT = "Check the network, or name another Debian mirror: --mirror URL, or MNNSMITH_DEBIAN_MIRROR."

# Called with the bytes that came since the last call.
Progress = Callable[[int], None]


def check_mirror(mirror: str) -> str:
    """The base address of a Debian mirror, without a last slash.  Raises UsageError."""
    parts = urlsplit(mirror)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"the mirror {mirror!r:.200} is no http or https address.",
            "For example: --mirror https://deb.debian.org/debian",
        )
    return mirror.rstrip("/")


def fetch_packages(pins: Pins, folder: Path, mirror: str, progress: Progress) -> list[Path]:
    """The packages as files in `folder`; what is there and has its hash is not fetched again.

    `progress` is told of those too.  Raises MissingResourceError when one cannot be had.
    """
    files = []
    for package in pins.packages:
        file = folder / package.file_name
        if file.is_file() and sha256_of(file) == package.sha256:
            progress(package.size_bytes)
        else:
            _fetch(package, [mirror, *pins.elsewhere], file, progress)
        files.append(file)
    return files


def _fetch(package: PinnedPackage, mirrors: Sequence[str], file: Path, progress: Progress) -> None:
    for mirror in mirrors:
        address = f"{mirror}/{quote(package.path)}"
        try:
            _download(address, package, file, progress)
            return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code not in _GONE:
                raise MissingResourceError(
                    f"{address}: the server refused it with {error.code}.", _HINT
                ) from error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if mirror == mirrors[0]:
                raise MissingResourceError(f"{address}: {reason}.", _HINT) from error
            break
    raise MissingResourceError(
        f"{package.file_name}: the pinned version is no longer on {mirrors[0]}, nor to be had from "
        f"{' or '.join(urlsplit(mirror).hostname or mirror for mirror in mirrors[1:])}.",
        "Update mnnsmith, which names newer versions, or name a mirror that keeps old ones: "
        "--mirror URL.",
    )


def _download(address: str, package: PinnedPackage, file: Path, progress: Progress) -> None:
    """One file, written aside and renamed once its size and hash are right."""
    part = file.with_name(file.name + ".part")
    with urllib.request.urlopen(address, timeout=_SILENCE_S) as answer, open(part, "wb") as copy:
        left = package.size_bytes
        while block := answer.read(min(_BLOCK_BYTES, left + 1)):
            left -= len(block)
            if left < 0:
                break
            copy.write(block)
            progress(len(block))
    if left or sha256_of(part) != package.sha256:
        part.unlink()
        raise MissingResourceError(
            f"{address}: not the file that we know: its size or sha256 differs "
            f"(expected {package.size_bytes} bytes, {package.sha256}).",
            "A download that was cut short or changed on the way: try again, or another mirror.",
        )
    os.replace(part, file)


def fetch_wheels(pins: Pins, folder: Path) -> list[Path]:
    """The wheels, which pip brings by name and hash from the index that it is set up for.

    Raises MissingResourceError when one cannot be had.
    """
    target = folder / "wheels"
    target.mkdir(exist_ok=True)
    lines = [f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n" for wheel in pins.wheels]
    with tempfile.NamedTemporaryFile("w", suffix=".txt", dir=folder) as requirements:
        requirements.writelines(lines)
        requirements.flush()
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
            "--only-binary", ":all:", "--disable-pip-version-check", "--no-input",
            "--implementation", "cp", "--python-version", pins.python_version,
            *(f"--platform={platform}" for platform in pins.platforms),
            "--dest", str(target), "--requirement", requirements.name,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise MissingResourceError("pip: the download did not end in time.") from error
    found = {sha256_of(path): path for path in target.glob("*.whl")}
    missing = [wheel.requirement for wheel in pins.wheels if wheel.sha256 not in found]
    if done.returncode != 0 or missing:
        said = done.stderr.strip().splitlines() or ["pip said nothing"]
        raise MissingResourceError(
            f"{', '.join(missing) or 'the wheels'} for aarch64: pip could not download them: "
            f"{said[-1]}",
            "Check the network and the package index. Without pip in this environment, run "
            "`python -m ensurepip` first.",
        )
    return [found[wheel.sha256] for wheel in pins.wheels]
