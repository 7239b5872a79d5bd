"""A constant of shape [1, 1, ...] in a broadcast is spread wrongly; a scalar is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if len(node.input) != 2:
        return None
    inputs = list(node.input)
    for side in (0, 1):
        value = view.constant(inputs[side])
        other = view.shape(inputs[1 - side])
        if value is None or value.size != 1 or value.ndim == 0 or other is None:
            continue
        # A scalar would give another rank where the constant has more axes than the other side.
        if len(other) >= value.ndim:
            inputs[side] = view.add_constant(value.reshape(()), f"{node.output[0]}_scalar")
    return [with_inputs(node, inputs)] if inputs != list(node.input) else None


RULE = Rule(
    name="leading_one_constant",
    operators=frozenset({"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max"}),
    reason="a constant of one element and several axes is broadcast wrongly",
    engines=("3.6.1",),
    cures=(),
    rewrite=_rewrite,
)
