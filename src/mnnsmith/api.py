"""The verbs of mnnsmith as Python functions; `import mnnsmith` offers the same names."""

from __future__ import annotations

from mnnsmith.bundle import Bundle, open_bundle
from mnnsmith.conversion.convert import ProgressCallback, convert
from mnnsmith.conversion.prepare import Prepared, prepare
from mnnsmith.engine import Engine, SamplingOptions
from mnnsmith.inspection.check import CheckReport, check
from mnnsmith.inspection.expert_use import ExpertUse, profile_experts
from mnnsmith.inspection.inspect import Inspection, inspect
from mnnsmith.onnx.export import Exported, export_onnx

__all__ = [
    "Bundle",
    "CheckReport",
    "Engine",
    "ExpertUse",
    "Exported",
    "Inspection",
    "Prepared",
    "ProgressCallback",
    "SamplingOptions",
    "check",
    "convert",
    "export_onnx",
    "inspect",
    "open_bundle",
    "prepare",
    "profile_experts",
]
