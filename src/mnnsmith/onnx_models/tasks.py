"""Tasks on an untrusted model, performed by the worker process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from mnnsmith import errors
from mnnsmith.engine.exits import describe_exit, log_tail
from mnnsmith.errors import ConversionError, MnnsmithError
from mnnsmith.onnx_models.worker import LOG, RESULT

MEMORY_LIMIT_BYTES = 6 << 30
OUTPUT_LIMIT_BYTES = 8 << 30
TIMEOUT_S = 300.0


class TaskFailedError(Exception):
    """A task crashed, hung or met an error that it does not know; `str()` says how."""


class Worker:
    """The worker process and the folders of its tasks, below `folder`; use it in a `with` block.

    memory_limit_bytes: address space of a task.  timeout_s: time of a task.
    """

    def __init__(
        self,
        folder: Path,
        *,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.folder = folder
        self._memory_limit_bytes = memory_limit_bytes
        self._timeout_s = timeout_s
        self._counter = itertools.count(1)
        # A session of its own: Ctrl-C reaches the parent, which ends the worker.
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def new_folder(self, name: str) -> Path:
        """A fresh folder for the files of one task."""
        folder = self.folder / f"{next(self._counter)}-{name}"
        folder.mkdir()
        return folder

    def run(self, task: str, folder: Path, **arguments: Any) -> Mapping[str, Any]:
        """Perform `task` in `folder`; raises what it raises, or TaskFailedError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {
            "task": task,
            "folder": str(folder),
            "arguments": arguments,
            "memory_limit_bytes": self._memory_limit_bytes,
            "output_limit_bytes": OUTPUT_LIMIT_BYTES,
            "timeout_s": self._timeout_s,
        }
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ConversionError("the process that reads models is gone.", "Try again.")
        status = json.loads(line)["status"]
        if status == "timeout":
            raise TaskFailedError(f"did not end within {self._timeout_s:g} s")
        result_path = folder / RESULT
        if not result_path.is_file():
            raise TaskFailedError(f"{describe_exit(status)}: {_last_lines(folder / LOG)}")
        result = json.loads(result_path.read_text(encoding="utf-8"))
        if "error" in result:
            kind: type[MnnsmithError] = getattr(errors, result["error"])
            raise kind(result["message"], result["hint"])
        value: Mapping[str, Any] = result["value"]
        return value


def _last_lines(log: Path) -> str:
    return " | ".join(log_tail(log).splitlines()[-3:])[-600:]
