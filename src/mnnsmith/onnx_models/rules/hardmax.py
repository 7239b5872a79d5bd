"""The engine has no `Hardmax`; it is a one at the place of the first largest value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_SINCE_AXIS = 13


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    shape = view.shape(node.input[0])
    if shape is None or view.opset < _SINCE_AXIS:
        return None
    axis = attributes(node).get("axis", -1) % len(shape)
    size, output = shape[axis], node.output[0]
    if not isinstance(size, int):
        return None
    place = view.fresh(f"{output}_place")
    depth = view.add_constant(np.int64(size), f"{output}_depth")
    values = view.add_constant(np.array([0, 1], np.float32), f"{output}_values")
    return [
        make("ArgMax", [node.input[0]], [place], node, axis=axis, keepdims=0),
        make("OneHot", [place, depth, values], [output], node, axis=axis),
    ]


RULE = Rule(
    name="hardmax",
    operators=frozenset({"Hardmax"}),
    reason="the converter has no Hardmax",
    engines=("3.6.1",),
    cures=("test_hardmax_example", "test_hardmax_axis_0"),
    rewrite=_rewrite,
)
