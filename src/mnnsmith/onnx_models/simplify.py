"""Constants folded and dead parts removed, by ONNX Runtime's basic optimizations.

They give standard operators only.  What they do is not trusted: the result is used if it is whole,
and the converted model is compared with the original, not with this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mnnsmith.onnx_runtime import onnx_runtime

if TYPE_CHECKING:
    from onnx import ModelProto

_FILE = "simplified.onnx"
# Folding may turn a few numbers into a large tensor.
_GROWTH, _GROWTH_BYTES = 1.5, 4 << 20
_LOG_FATAL = 4


def simplify(model: ModelProto, notes: list[str]) -> ModelProto:
    """The simplified model, or `model` with a note that says why."""
    runtime = onnx_runtime()
    import onnx
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    runtime.set_default_logger_severity(_LOG_FATAL)
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = _FILE
    options.intra_op_num_threads = 1
    options.log_severity_level = _LOG_FATAL
    try:
        runtime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
    except (state.Fail, state.InvalidGraph, state.NotImplemented, state.InvalidArgument,
            state.RuntimeException) as error:  # fmt: skip
        notes.append(f"not simplified: {str(error)[:200]}")
        return model
    simplified = onnx.load_model(Path(_FILE))
    Path(_FILE).unlink()
    if simplified.ByteSize() > model.ByteSize() * _GROWTH + _GROWTH_BYTES:
        notes.append("not simplified: the folded constants would be larger than what makes them")
        return model
    if [o.name for o in simplified.graph.output] != [o.name for o in model.graph.output]:
        notes.append("not simplified: the simplified model has other outputs")
        return model
    return simplified
