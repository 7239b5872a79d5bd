"""`ConstantOfShape` of bool reads four bytes of a fill value that has one.

An int32 fill and a `Cast` are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    from onnx import TensorProto, numpy_helper

    value = attributes(node).get("value")
    if value is None or value.data_type != TensorProto.BOOL:
        return None
    fill = numpy_helper.from_array(numpy_helper.to_array(value).astype(np.int32))
    filled = view.fresh(f"{node.output[0]}_int32")
    return [
        make("ConstantOfShape", node.input, [filled], node, value=fill),
        make("Cast", [filled], node.output, node, to=TensorProto.BOOL),
    ]


RULE = Rule(
    name="bool_constant_of_shape",
    operators=frozenset({"ConstantOfShape"}),
    reason="ConstantOfShape of bool fills with garbage",
    engines=("3.6.1",),
    cures=(),
    rewrite=_rewrite,
)
