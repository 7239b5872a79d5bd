"""What a child process left behind: how it ended, and the end of what it printed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

LOG_TAIL_BYTES = 4000


def describe_exit(status: int) -> str:
    """The exit status that `subprocess` gives, in words that go on from the process's name."""
    if status < 0:
        try:
            return f"crashed with {signal.Signals(-status).name}"
        except ValueError:
            return f"crashed with signal {-status}"
    return f"ended by itself with exit status {status}"


def log_tail(path: Path) -> str:
    """The end of a log; "(none)" where nothing was written, or the file is gone."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip() or "(none)"
    except OSError:
        return "(none)"
