"""ONNX Runtime as we import it leaves no trace in a user's home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = "from mnnsmith.onnx_runtime import onnx_runtime; print(onnx_runtime().__version__)"


def test_the_import_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))
    }
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True)
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.iterdir()) == []
