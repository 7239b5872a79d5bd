"""A quantized graph converts and then does not load; quantized constants are turned to floats.

y = (x - zero_point) * scale; both of one value, or one for each slice or block along `axis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    values = [view.constant(name) if name else None for name in node.input]
    x, scale = values[0], values[1]
    if x is None or scale is None or (len(node.input) > 2 and node.input[2] and values[2] is None):
        return None
    found = attributes(node)
    axis, block = found.get("axis", 1), found.get("block_size", 0)

    def spread(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
        wide = part.astype(np.float32)
        if block:
            return np.repeat(wide, block, axis).take(range(x.shape[axis]), axis)
        if wide.ndim == 1 and x.ndim:
            return wide.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])
        return wide

    zero = spread(values[2]) if len(values) > 2 and values[2] is not None else np.float32(0)
    y = (x.astype(np.float32) - zero) * spread(scale)
    name = view.add_constant(y.astype(scale.dtype), f"{node.output[0]}_floats")
    return [make("Identity", [name], node.output, node)]


RULE = Rule(
    name="constant_dequantize",
    operators=frozenset({"DequantizeLinear"}),
    reason="a graph with DequantizeLinear converts and does not load",
    engines=("3.6.1",),
    cures=("test_dequantizelinear_int4",),
    rewrite=_rewrite,
)
