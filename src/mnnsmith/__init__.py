"""From a checkpoint to a verified, quantized MNN bundle, without PyTorch.

    import mnnsmith

    bundle = mnnsmith.convert("path/to/model", "model-mnn", recipe="w4g64-head8")
    with mnnsmith.Engine(bundle.path) as engine:
        logits = engine.forward([1, 2, 3])

The verbs are those of the command line: `inspect`, `convert`, `check`, `verify`, ...
Importing this module loads nothing heavy; each name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mnnsmith.version import __version__

if TYPE_CHECKING:
    from mnnsmith.api import (
        Bundle,
        CheckReport,
        ConvertedModule,
        Engine,
        ExpertUse,
        Exported,
        Inspection,
        Prepared,
        SamplingOptions,
        Verification,
        check,
        compare_layers,
        convert,
        convert_onnx,
        export_onnx,
        inspect,
        open_bundle,
        prepare,
        profile_experts,
        profile_module,
        read_verification,
        recorded_verification,
        report_page,
        verify,
    )

__all__ = [
    "Bundle",
    "CheckReport",
    "ConvertedModule",
    "Engine",
    "ExpertUse",
    "Exported",
    "Inspection",
    "Prepared",
    "SamplingOptions",
    "Verification",
    "__version__",
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


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        from mnnsmith import api

        return getattr(api, name)
    raise AttributeError(f"module 'mnnsmith' has no attribute {name!r}")
