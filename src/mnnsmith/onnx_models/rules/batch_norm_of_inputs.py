"""`BatchNormalization` whose statistics are no constants crashes the converter; it is composed.

y = (x - mean) / sqrt(var + epsilon) * scale + bias, all of them spread along axis 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    found = attributes(node)
    shape = view.shape(node.input[0])
    if shape is None or found.get("training_mode", 0) or len(node.output) > 1:
        return None
    if all(view.constant(name) is not None for name in node.input[1:]):
        return None
    output = node.output[0]
    spread = view.add_constant(
        np.array([1, -1, *[1] * (len(shape) - 2)], np.int64), f"{output}_spread"
    )
    nodes: list[NodeProto] = []

    def step(op: str, *inputs: str, to: str = "") -> str:
        result = to or view.fresh(f"{output}_{op}")
        view.note_type(result, node.input[0])
        nodes.append(make(op, inputs, [result], node))
        return result

    scale, bias, mean, variance = (step("Reshape", name, spread) for name in node.input[1:])
    epsilon = view.add_constant(np.float32(found.get("epsilon", 1e-5)), f"{output}_epsilon")
    deviation = step("Sqrt", step("Add", variance, epsilon))
    normal = step("Div", step("Sub", node.input[0], mean), deviation)
    step("Add", step("Mul", normal, scale), bias, to=output)
    return nodes


RULE = Rule(
    name="batch_norm_of_inputs",
    operators=frozenset({"BatchNormalization"}),
    reason="statistics that are no constants crash the converter",
    engines=("3.6.1",),
    cures=("test_batchnorm_example", "test_batchnorm_epsilon"),
    rewrite=_rewrite,
)
