"""Our graph as the JSON form of the engine's schema, which the converter makes binary.

The converter runs no optimizer on this form, so it is the final graph.  An operator or union name
that the schema lacks crashes the converter, so every kind that a graph may hold stands in `_EMIT`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mnnsmith.errors import ConversionError
from mnnsmith.graph.core import GraphCore, Node
from mnnsmith.graph.values import DType, Layout
from mnnsmith.graph.weights import Slot
from mnnsmith.mnn.weight_records import MatrixRecord, VectorRecord, quantization_parameter

# The version that the engine compares with its own.
ENGINE_VERSION = "3.6.1"

Json: TypeAlias = dict[str, Any]
Record: TypeAlias = MatrixRecord | VectorRecord
# (operator type, union member, its fields)
_Emitted: TypeAlias = tuple[str, str, Json | None]


class Weights:
    """Where the slots of a graph stand in the weight file, and the few values kept in the graph."""

    def __init__(
        self,
        records: Mapping[tuple[str, str], Record],
        read_vector: Callable[[Slot], npt.NDArray[np.float32]],
    ) -> None:
        self._records = records
        self.read_vector = read_vector

    def matrix(self, node: Node, part: str) -> MatrixRecord:
        record = self._records[node.name, part]
        if not isinstance(record, MatrixRecord):
            raise ConversionError(f"{node.name}: {part} is no matrix.")
        return record

    def vector(self, node: Node, part: str) -> VectorRecord:
        record = self._records[node.name, part]
        if not isinstance(record, VectorRecord):
            raise ConversionError(f"{node.name}: {part} is no vector.")
        return record


def graph_json(graph: GraphCore, weights: Weights) -> Json:
    """The whole net as a JSON object."""
    net: Json = {
        "bizCode": "mnnsmith",
        "extraInfo": {"version": ENGINE_VERSION},
        "oplists": [_operator(node, weights) for node in graph.nodes],
        "outputName": [value.name for value in graph.outputs],
        "preferForwardType": "CPU",
        "sourceType": "ONNX",
        "tensorName": [value.name for value in graph.values],
        "tensorNumber": len(graph.values),
        "usage": "INFERENCE",
    }
    subgraphs = [sub for node in graph.nodes for sub in node.graphs]
    if subgraphs:
        net["subgraphs"] = [_subgraph(sub, weights) for sub in subgraphs]
    return net


def _subgraph(graph: GraphCore, weights: Weights) -> Json:
    return {
        "name": graph.name,
        "inputs": [node.outputs[0].index for node in graph.nodes if node.kind == "input"],
        "outputs": [value.index for value in graph.outputs],
        "tensors": [value.name for value in graph.values],
        "nodes": [_operator(node, weights) for node in graph.nodes],
    }


def _operator(node: Node, weights: Weights) -> Json:
    emit = _EMIT.get(node.kind)
    if emit is None:
        raise ConversionError(f"The engine has no operator for {node.kind} ({node.name}).")
    kind, union, fields = emit(node, weights)
    operator: Json = {
        "type": kind,
        "name": node.name,
        "outputIndexes": [value.index for value in node.outputs],
        "main_type": union,
        "defaultDimentionFormat": node.outputs[0].layout.value,
    }
    if fields is not None:
        operator["main"] = fields
    if node.inputs:
        operator["inputIndexes"] = [value.index for value in node.inputs]
    return operator


def _dims(node: Node) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in node.outputs[0].shape]


def _input(node: Node, _: Weights) -> _Emitted:
    dtype = "DT_FLOAT" if node.outputs[0].dtype is DType.FLOAT else "DT_INT32"
    return "Input", "Input", {"dims": _dims(node), "dtype": dtype, "dformat": "NCHW"}


def _integers(node: Node, _: Weights) -> _Emitted:
    values = list(node.attributes["values"])
    fields: Json = {"dataFormat": "NCHW", "dataType": "DT_INT32", "int32s": values}
    if node.outputs[0].shape:
        fields["dims"] = _dims(node)
    return "Const", "Blob", fields


def _table(node: Node, weights: Weights) -> _Emitted:
    record = weights.vector(node, "values")
    return "Const", "Blob", {
        "dims": _dims(node), "dataFormat": "NCHW", "dataType": "DT_FLOAT",
        "external": [record.offset, record.nbytes],
    }  # fmt: skip


def _convert(node: Node, _: Weights) -> _Emitted:
    source, target = node.inputs[0].layout, node.outputs[0].layout
    return "ConvertTensor", "TensorConvertInfo", {"source": source.value, "dest": target.value}


def _reshape(node: Node, _: Weights) -> _Emitted:
    # 0 copies the dimension at the same place, -1 is what is left.
    copied = node.attributes["copied"]
    dims = [0 if axis in copied else dim for axis, dim in enumerate(_dims(node))]
    return "Reshape", "Reshape", {"dims": dims, "dimType": "NCHW"}


def _shape(_: Node, __: Weights) -> _Emitted:
    return "Shape", "NONE", None


def _transpose(node: Node, _: Weights) -> _Emitted:
    return "Permute", "Permute", {"dims": list(node.attributes["order"])}


def _slice(node: Node, _: Weights) -> _Emitted:
    masks = ("beginMask", "endMask", "ellipsisMask", "newAxisMask", "shrinkAxisMask")
    fields: Json = {"Index": "DT_INVALID", "T": "DT_INVALID", **dict.fromkeys(masks, 0)}
    # The ONNX form: begin, end, axis and step are inputs.
    return "StridedSlice", "StridedSliceParam", {**fields, "fromType": 1}


def _concat(node: Node, _: Weights) -> _Emitted:
    return "Concat", "Axis", {"axis": node.attributes["axis"]}


def _gather(_: Node, __: Weights) -> _Emitted:
    types = ("Taxis", "Tindices", "Tparams")
    return "GatherV2", "GatherV2", dict.fromkeys(types, "DT_INVALID")


def _binary(node: Node, _: Weights) -> _Emitted:
    dtype = "DT_FLOAT" if node.outputs[0].dtype is DType.FLOAT else "DT_INT32"
    return "BinaryOp", "BinaryOp", {
        "opType": _BINARY[node.attributes["function"]], "T": dtype, "activationType": 0,
    }  # fmt: skip


def _unary(node: Node, _: Weights) -> _Emitted:
    return "UnaryOp", "UnaryOp", {"opType": _UNARY[node.attributes["function"]], "T": "DT_FLOAT"}


def _clip(node: Node, _: Weights) -> _Emitted:
    limit = node.attributes["limit"]
    return "ReLU6", "Relu6", {"minValue": -limit, "maxValue": limit}


def _pad(_: Node, __: Weights) -> _Emitted:
    return "Padding", "PadParam", {"mode": "CONSTANT"}


def _softmax(_: Node, __: Weights) -> _Emitted:
    return "Softmax", "Axis", {"axis": -1}


def _reduce(node: Node, _: Weights) -> _Emitted:
    return "Reduction", "ReductionParam", {
        "operation": _REDUCE[node.attributes["function"]], "dim": [node.attributes["axis"]],
        "coeff": 1.0, "keepDims": True, "dType": "DT_FLOAT",
    }  # fmt: skip


def _to_float(_: Node, __: Weights) -> _Emitted:
    return "Cast", "CastParam", {"srcT": "DT_INT32", "dstT": "DT_FLOAT"}


def _top_k(_: Node, __: Weights) -> _Emitted:
    return "TopKV2", "TopKV2", {"T": "DT_FLOAT", "sorted": True, "largest": True}


def _gather_last(_: Node, __: Weights) -> _Emitted:
    return "GatherElements", "NONE", None


def _matmul_transposed(_: Node, __: Weights) -> _Emitted:
    return "MatMul", "MatMul", {"T": "DT_FLOAT", "transposeA": False, "transposeB": True}


def _mixture(node: Node, _: Weights) -> _Emitted:
    a = node.attributes
    fields = (("num_experts", a["experts"]), ("top_k", a["top_k"]), ("layer_id", a["layer"]))
    return "MoE", "Extra", {"attr": [{"key": key, "i": value} for key, value in fields]}


def _repeat(node: Node, _: Weights) -> _Emitted:
    # Without a condition's graph the engine takes count, condition and values in, and out.
    return "While", "WhileParam", {"body_graph": node.graphs[0].name}


def _linear(node: Node, weights: Weights) -> _Emitted:
    record = weights.matrix(node, "weight")
    common = {
        "padX": 0, "padY": 0, "kernelX": 1, "kernelY": 1, "strideX": 1, "strideY": 1,
        "dilateX": 1, "dilateY": 1, "padMode": "CAFFE", "group": 1,
        "outputCount": record.rows, "inputCount": record.cols,
        "relu": False, "relu6": False, "hasOutputShape": False,
    }  # fmt: skip
    return "Convolution", "Convolution2D", {
        "common": common,
        "quanParameter": quantization_parameter(record),
        "external": record.external(),
    }  # fmt: skip


def _rms_norm(node: Node, weights: Weights) -> _Emitted:
    # The engine expects gain and offset, each of `half` bytes; an RMS norm's offset is zero.
    record = weights.vector(node, "gain")
    half = record.nbytes // 2
    return "LayerNorm", "LayerNorm", {
        "axis": [-1], "epsilon": node.attributes["epsilon"], "group": 1,
        "external": [record.offset, half, half], "useRMSNorm": True,
    }  # fmt: skip


def _layer_norm(node: Node, weights: Weights) -> _Emitted:
    gain, bias = (weights.vector(node, part) for part in ("gain", "bias"))
    if bias.offset != gain.offset + gain.nbytes:
        raise ConversionError(f"{node.name}: gain and bias must stand side by side.")
    return "LayerNorm", "LayerNorm", {
        "axis": [-1], "epsilon": node.attributes["epsilon"], "group": 1,
        "external": [gain.offset, gain.nbytes, bias.nbytes], "useRMSNorm": False,
    }  # fmt: skip


def _rope(node: Node, weights: Weights) -> _Emitted:
    a = node.attributes
    fields: Json = {
        "rope_cut_head_dim": a["rotary_dim"], "num_head": a["heads"],
        "kv_num_head": a["kv_heads"], "head_dim": a["head_dim"],
    }  # fmt: skip
    for part, key in (("q_gain", "q_norm"), ("k_gain", "k_norm")):
        if part in node.slots:
            gain = weights.read_vector(node.slots[part])
            # Here the schema has no external form; a gain of one head is small.
            fields[key] = {
                "axis": [-1], "epsilon": a["epsilon"], "group": 1, "useRMSNorm": True,
                "gamma": [float(g) for g in gain], "beta": [0.0] * len(gain),
            }  # fmt: skip
    return "RoPE", "RoPEParam", fields


def _attention(node: Node, _: Weights) -> _Emitted:
    return "Attention", "AttentionParam", {
        "kv_cache": True, "layer_index": node.attributes["layer"],
        "kv_shared_layer_index": -1, "output_c4": node.outputs[0].layout is Layout.NC4HW4,
        "attnScale": node.attributes["scale"],
    }  # fmt: skip


def _full_attention(node: Node, _: Weights) -> _Emitted:
    return "Attention", "AttentionParam", {
        "kv_cache": False, "layer_index": -1, "kv_shared_layer_index": -1, "output_c4": False,
        "attnScale": node.attributes["scale"],
    }  # fmt: skip


_BINARY = {
    "add": "ADD",
    "subtract": "SUB",
    "multiply": "MUL",
    "divide": "REALDIV",
    "minimum": "MINIMUM",
    "equal": "EQUAL",
    # b * sigmoid(b) * a
    "multiply_silu": "MUL_SILU",
}
_UNARY = {
    # 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
    "gelu_tanh": "GELU",
    "sigmoid": "SIGMOID",
    "square": "SQUARE",
}
_REDUCE = {"sum": "SUM", "maximum": "MAXIMUM"}

_EMIT: dict[str, Callable[[Node, Weights], _Emitted]] = {
    "input": _input,
    "integers": _integers,
    "table": _table,
    "convert": _convert,
    "reshape": _reshape,
    "shape": _shape,
    "transpose": _transpose,
    "slice": _slice,
    "concat": _concat,
    "gather": _gather,
    "binary": _binary,
    "unary": _unary,
    "clip": _clip,
    "pad": _pad,
    "softmax": _softmax,
    "reduce": _reduce,
    "to_float": _to_float,
    "top_k": _top_k,
    "gather_last": _gather_last,
    "matmul_transposed": _matmul_transposed,
    "mixture": _mixture,
    "repeat": _repeat,
    "linear": _linear,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "attention": _attention,
    "full_attention": _full_attention,
}
