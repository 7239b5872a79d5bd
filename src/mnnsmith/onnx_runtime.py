"""ONNX Runtime, imported so that it reports nothing and writes nothing."""

from __future__ import annotations

import os
from types import ModuleType


def onnx_runtime() -> ModuleType:
    """The package `onnxruntime`.

    Its import alone makes a device id and a database of usage in the user's cache; only this
    variable, set before, keeps it from that (`disable_telemetry_events` comes too late).
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    module: ModuleType = onnxruntime
    return module
