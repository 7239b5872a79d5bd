"""`Pow` of a base and an exponent of two types fails in the run; both become floats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, make, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_FLOAT = 1


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    types = [view.element_type(name) for name in node.input]
    if None in types or view.is_float(node.input[0]) == view.is_float(node.input[1]):
        return None
    nodes, inputs, output = [], [], node.output[0]
    for name in node.input:
        if view.is_float(name):
            inputs.append(name)
            continue
        inputs.append(view.fresh(f"{output}_float"))
        nodes.append(make("Cast", [name], [inputs[-1]], node, to=_FLOAT))
    power = with_inputs(node, inputs)
    nodes.append(power)
    if not view.is_float(node.input[0]):
        power.output[0] = view.fresh(f"{output}_power")
        nodes.append(make("Cast", [power.output[0]], [output], node, to=types[0]))
    return nodes


RULE = Rule(
    name="pow_of_one_type",
    operators=frozenset({"Pow"}),
    reason="Pow of two types fails in the run",
    engines=("3.6.1",),
    cures=("test_pow_types_float32_int32", "test_pow_types_int32_float32"),
    rewrite=_rewrite,
)
