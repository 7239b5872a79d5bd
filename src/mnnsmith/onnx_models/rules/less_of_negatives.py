"""`Less` of two negative floats compares bit patterns on AVX2.

`Greater` with the operands swapped is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if not view.is_float(node.input[0]):
        return None
    return [with_inputs(node, reversed(node.input), "Greater")]


RULE = Rule(
    name="less_of_negatives",
    operators=frozenset({"Less"}),
    reason="Less of two negative floats is wrong",
    engines=("3.6.1",),
    cures=("test_less", "test_less_bcast"),
    rewrite=_rewrite,
)
