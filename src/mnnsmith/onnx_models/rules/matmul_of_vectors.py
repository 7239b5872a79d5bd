"""`MatMul` of a vector writes beyond its memory; it is a matrix of one row, or of one column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, make, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_AXES_AS_INPUT_SINCE = 13


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    shapes = [view.shape(name) for name in node.input]
    vectors = [shape is not None and len(shape) == 1 for shape in shapes]
    if not any(vectors):
        return None
    output = node.output[0]
    nodes: list[NodeProto] = []

    def moved(op: str, name: str, axes: list[int], to: str = "") -> str:
        result = to or view.fresh(f"{output}_{op}")
        if view.opset < _AXES_AS_INPUT_SINCE:
            nodes.append(make(op, [name], [result], node, axes=axes))
        else:
            given = view.add_constant(np.array(axes, np.int64), f"{output}_axes")
            nodes.append(make(op, [name, given], [result], node))
        return result

    left, right = node.input
    left = moved("Unsqueeze", left, [0]) if vectors[0] else left
    right = moved("Unsqueeze", right, [1]) if vectors[1] else right
    product = view.fresh(f"{output}_product")
    matrix = with_inputs(node, [left, right])
    matrix.output[0] = product
    nodes.append(matrix)
    gone = [axis for axis, is_vector in zip((-2, -1), vectors, strict=True) if is_vector]
    moved("Squeeze", product, gone, to=output)
    return nodes


RULE = Rule(
    name="matmul_of_vectors",
    operators=frozenset({"MatMul"}),
    reason="MatMul of a vector writes beyond its memory",
    engines=("3.6.1",),
    cures=("test_matmul_1d_1d", "test_matmul_1d_3d"),
    rewrite=_rewrite,
)
