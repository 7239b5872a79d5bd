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
from mnnsmith.onnx_models.convert import ConvertedModule, convert_onnx
from mnnsmith.onnx_models.layers import LayerComparison, TensorComparison, compare_layers
from mnnsmith.onnx_models.profile import ProfiledModule, profile_module
from mnnsmith.report.page import report_page
from mnnsmith.verify.output.record import recorded_verification
from mnnsmith.verify.output.results_json import read_verification
from mnnsmith.verify.results import Verification
from mnnsmith.verify.verify import verify

__all__ = [
    "Bundle",
    "CheckReport",
    "ConvertedModule",
    "Engine",
    "ExpertUse",
    "Exported",
    "Inspection",
    "LayerComparison",
    "Prepared",
    "ProfiledModule",
    "ProgressCallback",
    "SamplingOptions",
    "TensorComparison",
    "Verification",
    "check",
    "compare_layers",
    "convert",
    "convert_onnx",
    "export_onnx",
    "inspect",
    "open_bundle",
    "prepare",
    "profile_experts",
    "profile_module",
    "read_verification",
    "recorded_verification",
    "report_page",
    "verify",
]
