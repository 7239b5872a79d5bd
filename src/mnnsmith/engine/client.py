"""The process of one runner, and the conversation with it.

Two threads own the pipes: one starts the process and reads, one writes.  So an interrupt of the
caller (Ctrl-C reaches the main thread only) can never split a frame, and the kernel's "die with
your parent" signal, which really watches the starting thread, lasts as long as the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mnnsmith.engine.device import Launch, LocalDevice
from mnnsmith.engine.exits import describe_exit, log_tail
from mnnsmith.engine.runner import Arrays, DamagedStreamError, read_frame, write_frame
from mnnsmith.errors import EngineError

LOG = "log"
EXIT_GRACE_S = 5.0
WAIT_SLICE_S = 1.0

Header = Mapping[str, Any]


class RunnerRefusedError(Exception):
    """The runner says that a request is wrong; its state is as it was."""


@dataclass(eq=False)
class _Process:
    """What the threads share.  It knows nothing of `Runner`, so that a lost one is collected."""

    launch: Launch
    folder: Path
    requests: queue.SimpleQueue[tuple[Header, Arrays] | None] = field(
        default_factory=queue.SimpleQueue
    )
    replies: queue.SimpleQueue[tuple[Header, Arrays] | str] = field(
        default_factory=queue.SimpleQueue
    )
    started: threading.Event = field(default_factory=threading.Event)
    popen: subprocess.Popen[bytes] | None = None
    owner_pid: int = field(default_factory=os.getpid)
    inherited: tuple[int, ...] = ()


def _start(process: _Process) -> subprocess.Popen[bytes]:
    with open(process.folder / LOG, "wb") as log:
        return subprocess.Popen(
            process.launch.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=process.folder,
            env=process.launch.environment,
            bufsize=0,
            start_new_session=True,
            pass_fds=process.inherited,
        )


def _read(process: _Process) -> None:
    """Thread: start the process, pass its frames on; at the end a text that says why."""
    try:
        process.popen = popen = _start(process)
    except OSError as error:
        process.replies.put(f"could not be started: {error}")
        return
    finally:
        # Only now: who waits for it takes a process that is not there for one that never will be.
        process.started.set()
    assert popen.stdout is not None
    try:
        while (frame := read_frame(popen.stdout.fileno())) is not None:
            process.replies.put(frame)
    except (DamagedStreamError, ValueError) as error:
        process.replies.put(f"sent something that is no reply ({error})")
        popen.kill()
    popen.stdout.close()
    popen.wait()
    process.requests.put(None)
    process.replies.put(describe_exit(popen.returncode))


def _write(process: _Process) -> None:
    """Thread: pass requests on, in order; None ends the conversation."""
    process.started.wait()
    popen = process.popen
    if popen is None or popen.stdin is None:
        return
    try:
        while (frame := process.requests.get()) is not None:
            write_frame(popen.stdin.fileno(), *frame)
    except BrokenPipeError:
        pass  # The reading thread reports how the process ended.
    popen.stdin.close()


def _end(process: _Process, threads: Sequence[threading.Thread]) -> None:
    """Ask the process to end, make sure that it does, remove its folder."""
    if os.getpid() != process.owner_pid:
        return  # A fork of the owner: the process is not its own to end.
    process.requests.put(None)
    process.started.wait()
    if process.popen is not None:
        try:
            process.popen.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
    for thread in threads:
        # The garbage collector may run this in one of them.
        if thread is not threading.current_thread():
            thread.join()
    shutil.rmtree(process.folder, ignore_errors=True)


class Runner:
    """A runner process; one caller at a time (the engine holds the lock)."""

    def __init__(self, launch: Launch | None = None, inherited: tuple[int, ...] = ()) -> None:
        """Start a runner, by default on this machine, in a folder of its own.

        inherited: file descriptors that it keeps open for as long as it lives.
        """
        self._ids = itertools.count(1)
        self._process = _Process(
            launch or LocalDevice().launch(),
            Path(tempfile.mkdtemp(prefix="mnnsmith-engine-")),
            inherited=inherited,
        )
        threads = [
            threading.Thread(target=target, args=(self._process,), daemon=True)
            for target in (_read, _write)
        ]
        for thread in threads:
            thread.start()
        self._finalizer = weakref.finalize(self, _end, self._process, threads)
        self._process.started.wait()
        self.uncertain = False

    @property
    def pid(self) -> int | None:
        return self._process.popen.pid if self._process.popen else None

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def call(
        self,
        op: str,
        arrays: Arrays | None = None,
        *,
        silence_s: float,
        on_partial: Callable[[Header, Arrays], None] | None = None,
        **fields: Any,
    ) -> tuple[Header, Arrays]:
        """Send a request and wait for its last reply.

        `silence_s` bounds the time without any sign of life; partial replies are such signs.
        Raises RunnerRefusedError, or EngineError (the process is then gone).
        """
        if self.closed:
            raise EngineError("the engine is closed.", "Open a new one.")
        request_id = next(self._ids)
        try:
            self._process.requests.put(({"op": op, "id": request_id, **fields}, arrays or {}))
            while True:
                header, results = self._receive(op, silence_s)
                if header["id"] != request_id:
                    continue
                if header.get("partial"):
                    if on_partial is not None:
                        on_partial(header, results)
                    continue
                break
        except EngineError:
            raise
        except BaseException:
            # Interrupted: the next request makes the runner stop at the end of its current piece.
            self.uncertain = True
            self._process.requests.put(({"op": "status", "id": next(self._ids)}, {}))
            raise
        self.uncertain = False
        error = header.get("error")
        if error == "refused":
            raise RunnerRefusedError(header["message"])
        if error is not None:
            log = self.log_tail()
            self.kill()
            raise EngineError(f"{op}: {header['message']} The engine's last output:\n{log}")
        return header, results

    def _receive(self, op: str, silence_s: float) -> tuple[Header, Arrays]:
        deadline = time.monotonic() + silence_s
        reply = None
        while reply is None and (left := deadline - time.monotonic()) > 0:
            # In slices: Python looks at a signal that met another thread only between two calls.
            with contextlib.suppress(queue.Empty):
                reply = self._process.replies.get(timeout=min(left, WAIT_SLICE_S))
        if reply is None:
            log = self.log_tail()
            self.kill()
            raise EngineError(
                f"the engine gave no sign of life for {silence_s:g} s during {op!r} and was "
                f"stopped. Its last output:\n{log}",
                "Allow more time, or use a smaller model.",
            )
        if isinstance(reply, str):
            log = self.log_tail()
            self.close()
            raise EngineError(f"the engine {reply} during {op!r}. Its last output:\n{log}")
        return reply

    def log_tail(self) -> str:
        """The end of what the engine printed."""
        return log_tail(self._process.folder / LOG)

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        if self._process.popen is not None:
            self._process.popen.kill()
        self.close()

    def close(self) -> None:
        """End the process and remove its folder; twice is fine."""
        self._finalizer()
