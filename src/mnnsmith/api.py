"""The verbs of mnnsmith as Python functions; `import mnnsmith` offers the same names."""

from __future__ import annotations

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.conversion.convert import Prepared, ProgressCallback, convert, prepare
from mnnsmith.engine import Engine, SamplingOptions

__all__ = [
    "Bundle",
    "Engine",
    "Prepared",
    "ProgressCallback",
    "SamplingOptions",
    "convert",
    "open_bundle",
    "prepare",
]
