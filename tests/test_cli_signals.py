"""A program that is told to end leaves no temporary files and no processes behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mnnsmith.api import convert
from mnnsmith.selftest import write_tiny_checkpoint

pytestmark = pytest.mark.engine
PROGRAM = [sys.executable, "-m", "mnnsmith.cli"]
PATIENCE_S = 60


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_verification_that_is_ended(number: int, status: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    source, bundle, temporary = (tmp_path / name for name in ("source", "bundle", "tmp"))
    temporary.mkdir()
    write_tiny_checkpoint(source)
    convert(source, bundle, recipe="fp16")
    command = [*PROGRAM, "verify", bundle, "--source", source, "--reference", "onnx"]
    with subprocess.Popen(
        [*command, "--check", "exact,layers,statistical", "--no-record"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        # The reference's own copy of the weights: the work has begun.
        until = time.monotonic() + PATIENCE_S
        while not list(temporary.glob("mnnsmith-onnx-*/*.data")):
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, error
    assert b"Traceback" not in error and b"passed" not in out
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert alive == [] and list(temporary.iterdir()) == []
