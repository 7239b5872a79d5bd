"""Empty axes of a reduction are misread when they come as an input.

They mean all axes, or none with `noop_with_empty_axes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, with_attributes, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if len(node.input) < 2:
        noop = bool(attributes(node).get("noop_with_empty_axes", 0))
        axes_given = "axes" in attributes(node)
        empty = noop and not axes_given
    else:
        axes = view.constant(node.input[1]) if node.input[1] else None
        none_by_shape = view.shape(node.input[1]) == (0,)
        empty = not node.input[1] or none_by_shape or (axes is not None and axes.size == 0)
        noop = bool(attributes(node).get("noop_with_empty_axes", 0))
    if not empty:
        return None
    bare = with_attributes(with_inputs(node, node.input[:1]), {"noop_with_empty_axes": None})
    if noop:
        return [with_attributes(with_inputs(bare, bare.input, "Identity"), {"keepdims": None})]
    return [bare] if len(node.input) > 1 else None


RULE = Rule(
    name="reduction_axes",
    operators=frozenset({"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"}),
    reason="empty axes as an input are misread",
    engines=("3.6.1",),
    cures=(),
    rewrite=_rewrite,
)
