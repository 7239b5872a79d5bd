"""A model's inputs and outputs, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mnnsmith.errors import SourceError, UnsupportedError

if TYPE_CHECKING:
    from onnx import ModelProto, ValueInfoProto

# Types that numpy has and that the engine can be fed, in some width.
DTYPES = frozenset({
    "float16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool",
})  # fmt: skip

Port = dict[str, Any]


def signature_of(model: ModelProto, path: Path) -> tuple[list[Port], list[Port]]:
    """Inputs and outputs as {name, dtype, shape}; a size is a number, an axis' name, or None.

    shape is None where the rank is unknown.  Raises UnsupportedError for what is no tensor of
    numbers.
    """
    constant = {t.name for t in model.graph.initializer}
    inputs = [_port(v, path) for v in model.graph.input if v.name not in constant]
    outputs = [_port(v, path) for v in model.graph.output]
    if not outputs:
        raise SourceError(f"{path}: the model has no output.")
    return inputs, outputs


def _port(value: ValueInfoProto, path: Path) -> Port:
    from onnx import helper

    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise UnsupportedError(
            f"{path}: {value.name!r} is a {str(kind).removesuffix('_type')}; the engine takes and "
            "gives tensors only.",
            "Export the model with tensors as inputs and outputs.",
        )
    tensor = value.type.tensor_type
    try:
        dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    except KeyError as error:
        raise SourceError(
            f"{path}: {value.name!r} is of unknown type {tensor.elem_type}."
        ) from error
    if dtype not in DTYPES:
        dtype = "string" if dtype == "object" else dtype
        raise UnsupportedError(
            f"{path}: {value.name!r} is of type {dtype}, which the engine does not take.",
            "Export the model with float32 or int32 inputs and outputs.",
        )
    shape = [_size(d) for d in tensor.shape.dim] if tensor.HasField("shape") else None
    return {"name": value.name, "dtype": dtype, "shape": shape}


def _size(dim: Any) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None
