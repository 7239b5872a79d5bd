"""A process that forks one child for each task on an untrusted model.

Parsers, simplifiers and runtimes are native code that may crash, hang or eat memory on a damaged
model.  Each task runs in a child of its own with bounds on memory and time; imports are paid once.
Requests and replies are JSON lines on stdin and stdout; arrays pass as files in the task's folder.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

# Name of a task: its module; the function is `run_task(arguments) -> dict`.
TASKS = {
    "layers": "mnnsmith.onnx_models.layer_task",
    "prepare": "mnnsmith.onnx_models.prepare",
    "reference": "mnnsmith.onnx_models.reference",
}
RESULT = "result.json"
LOG = "log"
_RAISED = 3


def main() -> int:
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    _die_with_parent()
    for line in sys.stdin:
        reply = _serve(json.loads(line))
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
    return 0


def _serve(request: dict[str, Any]) -> dict[str, Any]:
    # The parts that all tasks need; a runtime with threads is imported in the child alone.
    import numpy  # noqa: F401
    import onnx.inliner
    import onnx.reference
    import onnx.shape_inference
    import onnx.version_converter  # noqa: F401

    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _child(request)
    os.close(write)
    # The child holds the other end until it is gone, however it goes.
    ready, _, _ = select.select([read], [], [], request["timeout_s"])
    os.close(read)
    if not ready:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return {"status": "timeout"}
    return {"status": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def _child(request: dict[str, Any]) -> None:
    status = 1
    try:
        _bound(request)
        status = _perform(request)
    except BaseException:  # noqa: BLE001  The log is all that a child leaves behind.
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _bound(request: dict[str, Any]) -> None:
    import resource

    _die_with_parent()
    folder = request["folder"]
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(os.path.join(folder, LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    limits = {
        resource.RLIMIT_AS: request["memory_limit_bytes"],
        resource.RLIMIT_FSIZE: request["output_limit_bytes"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))


def _perform(request: dict[str, Any]) -> int:
    from mnnsmith.errors import MnnsmithError

    task = importlib.import_module(TASKS[request["task"]])
    try:
        result = {"value": task.run_task(request["arguments"])}
        status = 0
    except MnnsmithError as error:
        kind = type(error).__name__
        result = {"error": kind, "message": error.message, "hint": error.hint}
        status = _RAISED
    Path(RESULT).write_text(json.dumps(result), encoding="utf-8")
    return status


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    raise SystemExit(main())
