"""The engine has no `Dropout`; outside training it gives its input, and a mask of ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    from onnx import numpy_helper

    if len(node.input) > 2 and node.input[2]:
        training = view.constant(node.input[2])
        if training is None or training.any():
            return None
    nodes = [make("Identity", [node.input[0]], [node.output[0]], node)]
    if len(node.output) > 1 and node.output[1]:
        shape = view.fresh(f"{node.output[1]}_shape")
        true = numpy_helper.from_array(np.array([True]))
        nodes.append(make("Shape", [node.input[0]], [shape], node))
        nodes.append(make("ConstantOfShape", [shape], [node.output[1]], node, value=true))
    return nodes


RULE = Rule(
    name="idle_dropout",
    operators=frozenset({"Dropout"}),
    reason="Dropout is converted to an operator that the engine lacks",
    engines=("3.6.1",),
    cures=("test_dropout_default", "test_dropout_default_mask"),
    rewrite=_rewrite,
)
