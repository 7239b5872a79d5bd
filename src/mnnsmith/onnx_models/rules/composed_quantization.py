"""A quantized graph converts and then does not load; it is composed of float operators.

quantized = clip(round(x / scale) + zero_point); restored = (quantized - zero_point) * scale, where
both parameters are of one value, or of one for each slice along `axis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_FLOAT, _UINT8, _INT8, _UINT16, _INT16, _INT32 = 1, 2, 3, 4, 5, 6
# Types that the engine has, or that fit its 32 bits.
_RANGES = {_UINT8: (0, 255), _INT8: (-128, 127), _UINT16: (0, 65535), _INT16: (-32768, 32767)}


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    found = attributes(node)
    shape, parameters = view.shape(node.input[0]), view.shape(node.input[1])
    if found.get("block_size", 0) or shape is None or parameters is None:
        return None
    output, zero = node.output[0], node.input[2] if len(node.input) > 2 else ""
    zero_type = view.element_type(zero) if zero else None
    restoring = node.op_type == "DequantizeLinear"
    kind = view.element_type(node.input[0]) if restoring else zero_type
    if kind is None and not restoring:
        kind = found.get("output_dtype", 0) or _UINT8
    if kind not in _RANGES and not (restoring and kind == _INT32):
        return None
    if restoring and all(view.constant(name) is not None for name in node.input if name):
        return None
    nodes: list[NodeProto] = []

    def step(op: str, *inputs: str, result: str = "", **attrs: Any) -> str:
        name = result or view.fresh(f"{output}_{op}")
        nodes.append(make(op, inputs, [name], node, **attrs))
        return name

    def spread(name: str) -> str:
        if not parameters or len(shape) < 2:
            return name
        sizes = np.ones(len(shape), np.int64)
        sizes[found.get("axis", 1)] = -1
        return step("Reshape", name, view.add_constant(sizes, f"{output}_spread"))

    scale = spread(node.input[1])
    offset = spread(step("Cast", zero, to=_FLOAT)) if zero else ""
    if restoring:
        wide = step("Cast", node.input[0], to=_FLOAT)
        step("Mul", step("Sub", wide, offset) if offset else wide, scale, result=output)
        return nodes
    rounded = step("Round", step("Div", node.input[0], scale))
    low, high = (view.add_constant(np.float32(end), f"{output}_end") for end in _RANGES[kind])
    moved = step("Add", rounded, offset) if offset else rounded
    step("Cast", step("Clip", moved, low, high), result=output, to=kind)
    return nodes


RULE = Rule(
    name="composed_quantization",
    operators=frozenset({"QuantizeLinear", "DequantizeLinear"}),
    reason="a graph with QuantizeLinear or DequantizeLinear converts and does not load",
    engines=("3.6.1",),
    cures=("test_quantizelinear", "test_dequantizelinear", "test_quantizelinear_axis"),
    rewrite=_rewrite,
)
