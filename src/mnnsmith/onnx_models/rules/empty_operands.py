"""`Concat` with an empty operand reads memory that nobody wrote; such operands are left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, Shape, attributes, make, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    axis = attributes(node)["axis"]
    kept = [name for name in node.input if not _is_empty(view.shape(name), axis)]
    if not kept or len(kept) == len(node.input):
        return None
    if len(kept) > 1:
        return [with_inputs(node, kept)]
    return [make("Identity", kept, node.output, node)]


def _is_empty(shape: Shape | None, axis: int) -> bool:
    return shape is not None and len(shape) > 0 and shape[axis] == 0


RULE = Rule(
    name="empty_operands",
    operators=frozenset({"Concat"}),
    reason="Concat with an empty operand gives garbage",
    engines=("3.6.1",),
    cures=("test_rotary_embedding",),
    rewrite=_rewrite,
)
