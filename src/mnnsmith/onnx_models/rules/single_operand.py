"""`Min`, `Max`, `Sum` and `Mean` of one operand crash the converter; they are the operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    return [with_inputs(node, node.input, "Identity")] if len(node.input) == 1 else None


RULE = Rule(
    name="single_operand",
    operators=frozenset({"Min", "Max", "Sum", "Mean"}),
    reason="with one operand it crashes the converter",
    engines=("3.6.1",),
    cures=("test_max_one_input", "test_min_one_input", "test_sum_one_input", "test_mean_one_input"),
    rewrite=_rewrite,
)
