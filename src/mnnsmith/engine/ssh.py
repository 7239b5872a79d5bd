"""Bundles on another host, over the plain `ssh` program.

The host needs Python 3.10 with MNN and numpy, nothing of ours: `ssh_receive.py` is passed as an
argument, the runner and the bundle are copied once and found again by their hashes.  It is asked
for nothing: a host that wants a password, or whose key is unknown, is an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mnnsmith.engine.device import RUNNER, Launch
from mnnsmith.engine.exits import log_tail
from mnnsmith.engine.machine import installed_version
from mnnsmith.errors import EngineError, MissingResourceError, UsageError
from mnnsmith.files import sha256_once

RECEIVER = Path(__file__).with_name("ssh_receive.py")
PYTHON_NEEDED = (3, 10)
SILENCE_S = 60.0
_BLOCK_BYTES = 1 << 18
_ANSWER_LIMIT_BYTES = 1 << 20
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    # A connection that is lost ends within a minute.
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
_CONNECTION_FAILED = 255
# Neither part can begin like an option of ssh.
_DESTINATION = re.compile(
    r"(?P<host>(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?(?:[A-Za-z0-9_][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<folder>/[^\x00-\x1f\x7f]+)?"
)
# $1 is our folder there, or empty.
_SET_UP = """folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mnnsmith}
python=$folder/venv/bin/python3
[ -x "$python" ] || python=python3
"""
_RECEIVE = _SET_UP + 'exec "$python" -c "$2" "$folder"'
# The runner's own folder: the engine writes there, and two must not share it.
_RUN = (
    _SET_UP
    + 'own=$(mktemp -d) && cd "$own" || exit 1\n"$python" "$2"\n'
    + 'status=$?\ncd / && rm -rf "$own"\nexit $status'
)


@dataclass(frozen=True)
class SshDevice:
    """Another host.

    host: `host` or `user@host`, as ssh takes it.  port: None takes ssh's own.  folder: an absolute
    path for our files there; None is ~/.cache/mnnsmith.  Its `venv/bin/python3` is used if there is
    one.
    """

    host: str
    port: int | None = None
    folder: str | None = None

    # It may be a phone or a single-board computer.
    time_factor: ClassVar[float] = 10.0
    maps_weights: ClassVar[bool] = False

    @property
    def name(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"ssh:{self.host}{port}{self.folder or ''}"

    def launch(self, script: Path = RUNNER) -> Launch:
        """Check what the host has, and copy the runner.

        Raises MissingResourceError that names what it lacks, EngineError when it does not answer.
        """
        folder = self._copy(sorted({RUNNER, script}))
        return Launch(self._command(_RUN, f"{folder}/{script.name}"))

    def send(self, bundle: Path) -> str:
        return self._copy(sorted(path for path in bundle.iterdir() if path.is_file()))

    def _command(self, script: str, *arguments: str) -> tuple[str, ...]:
        # The login shell there may be any; it has to understand single quotes only.
        remote = shlex.join(["sh", "-c", script, "sh", self.folder or "", *arguments])
        port = () if self.port is None else ("-p", str(self.port))
        return ("ssh", *_OPTIONS, *port, "--", self.host, f"exec {remote}")

    def _copy(self, files: Sequence[Path]) -> str:
        """Copy what is not there yet: the folder with all of `files` by name."""
        try:
            entries = [_entry(path) for path in files]
        except OSError as error:
            raise EngineError(f"{error.filename}: cannot be read: {error.strerror}.") from error
        sources = {entry["sha256"]: path for entry, path in zip(entries, files, strict=True)}
        with self._connect() as connection:
            connection.write(json.dumps({"files": entries}).encode("ascii") + b"\n")
            report = connection.answer()
            self._check(report)
            for sha256 in report["missing"]:
                if sha256 not in sources:
                    raise EngineError(f"{self.name}: it asks for a file that it was not offered.")
                with open(sources[sha256], "rb") as file:
                    while block := file.read(_BLOCK_BYTES):
                        connection.write(block)
            connection.write(b"done\n")
            folder = connection.answer().get("folder")
            if not isinstance(folder, str):
                raise EngineError(f"{self.name}: it did not tell where its files are.")
            return folder

    def _check(self, report: dict[str, Any]) -> None:
        engine = installed_version("MNN")
        install = f"pip install MNN=={engine} numpy"
        python = report.get("python")
        numbers = re.match(r"(\d+)\.(\d+)", python) if isinstance(python, str) else None
        if numbers is None or (int(numbers[1]), int(numbers[2])) < PYTHON_NEEDED:
            raise MissingResourceError(
                f"{self.name}: Python {'.'.join(map(str, PYTHON_NEEDED))} or newer is needed, "
                f"found {python!r:.80}.",
                "Install one there; `venv/bin/python3` in our folder is used if there is one.",
            )
        for package, wanted in (("MNN", engine), ("numpy", None)):
            found = report.get(package)
            if found is None or (wanted is not None and found != wanted):
                raise MissingResourceError(
                    f"{self.name}: {package} {wanted or ''} is needed there, found "
                    f"{'none' if found is None else repr(found)[:80]}.",
                    f"Install it there: {install} (into the environment `venv` of "
                    f"{self.folder or '~/.cache/mnnsmith'}, where the system's Python refuses).",
                )
        if not isinstance(report.get("missing"), list):
            raise EngineError(f"{self.name}: it did not tell which files it lacks.")

    @contextlib.contextmanager
    def _connect(self) -> Iterator[_Connection]:
        command = self._command(_RECEIVE, RECEIVER.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory(prefix="mnnsmith-ssh-") as scratch:
            log = Path(scratch) / "log"
            try:
                with open(log, "wb") as file:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        bufsize=0,
                        start_new_session=True,
                    )
            except FileNotFoundError as error:
                raise MissingResourceError(
                    "the program ssh is not installed.", "Install OpenSSH's client."
                ) from error
            connection = _Connection(self.name, process, log)
            try:
                yield connection
            finally:
                connection.close()


class _Connection:
    """Our end of a receiver; every wait is bounded."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._name = name
        self._process = process
        self._log = log
        self._in, self._out = process.stdin.fileno(), process.stdout.fileno()
        os.set_blocking(self._in, False)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if not select.select([], [self._in], [], SILENCE_S)[1]:
                raise self._silent()
            try:
                view = view[os.write(self._in, view) :]
            except BrokenPipeError as error:
                raise self._ended() from error

    def answer(self) -> dict[str, Any]:
        """One line of JSON from there."""
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self._out], [], [], SILENCE_S)[0]:
                raise self._silent()
            part = os.read(self._out, _BLOCK_BYTES)
            line += part
            if not part or len(line) > _ANSWER_LIMIT_BYTES:
                if line:
                    break
                raise self._ended()
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{self._name}: it said {line[:200]!r} where an answer was expected.",
                "Do its shell's start-up files print something?",
            ) from error
        if not isinstance(found, dict):
            raise EngineError(f"{self._name}: an answer that is no object: {line[:200]!r}.")
        if "error" in found:
            raise EngineError(f"{self._name}: {found['error']!s:.500}.")
        return found

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _silent(self) -> EngineError:
        return EngineError(
            f"{self._name}: it gave no sign of life for {SILENCE_S:g} s. ssh's last words:\n"
            f"{log_tail(self._log)}"
        )

    def _ended(self) -> EngineError:
        """What ssh's end means: the connection failed, or the command there did."""
        status = self._process.wait()
        if status == _CONNECTION_FAILED:
            return EngineError(
                f"{self._name}: there is no connection: {log_tail(self._log)}",
                f"Does `ssh {self._name.removeprefix('ssh:').partition('/')[0]}` work without a "
                "password or a question?",
            )
        return EngineError(
            f"{self._name}: its python3 ended with exit status {status}: {log_tail(self._log)}",
            "Python 3.10 or newer, MNN and numpy are needed there.",
        )


def _entry(path: Path) -> dict[str, Any]:
    """What the receiver is told of a file."""
    return {"name": path.name, "size_bytes": path.stat().st_size, "sha256": sha256_once(path)}


def parse_ssh(text: str) -> SshDevice:
    """The host of `[user@]host[:port][/folder]`.  Raises UsageError."""
    found = _DESTINATION.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else None
    if found is None or (port is not None and not 1 <= port <= 65535):
        raise UsageError(
            f"ssh:{text!r:.200} names no host.",
            "For example: ssh:user@host, ssh:user@host:2222 or ssh:user@host/data/mnnsmith",
        )
    return SshDevice(found["host"], port, found["folder"])
