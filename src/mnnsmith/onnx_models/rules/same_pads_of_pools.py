"""The odd element of `SAME_LOWER` comes to the wrong side of a pool; pads are written out.

total = (ceil(size / stride) - 1) * stride + (kernel - 1) * dilation + 1 - size; the larger half
comes first for SAME_LOWER, last for SAME_UPPER."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, with_attributes
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    found = attributes(node)
    kind, shape = found.get("auto_pad", "NOTSET"), view.shape(node.input[0])
    if kind not in ("SAME_LOWER", "SAME_UPPER") or shape is None:
        return None
    first, last = [], []
    kernel = found["kernel_shape"]
    axes = len(kernel)
    strides = found.get("strides", [1] * axes)
    dilations = found.get("dilations", [1] * axes)
    for size, width, stride, dilation in zip(shape[2:], kernel, strides, dilations, strict=True):
        if not isinstance(size, int):
            return None
        total = max(0, (-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size)
        larger, smaller = total - total // 2, total // 2
        first.append(larger if kind == "SAME_LOWER" else smaller)
        last.append(smaller if kind == "SAME_LOWER" else larger)
    return [with_attributes(node, {"auto_pad": None, "pads": [*first, *last]})]


RULE = Rule(
    name="same_pads_of_pools",
    operators=frozenset({"MaxPool", "AveragePool", "LpPool"}),
    reason="SAME_LOWER pads the wrong side",
    engines=("3.6.1",),
    cures=("test_averagepool_2d_same_lower", "test_maxpool_2d_same_lower"),
    rewrite=_rewrite,
)
