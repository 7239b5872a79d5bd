"""Operators on int8 and uint8 crash the engine, or read wrong bytes; 32 bits are right.

Results beyond eight bits, which ONNX leaves open for signed types, wrap in uint8 by a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, make, with_inputs
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_TO_BOOL = frozenset({"Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal"})
_TO_INDEX = frozenset({"ArgMax", "ArgMin"})
_IN_FLOAT = frozenset({"MaxPool", "ReduceMean"})
_WRAPPING = frozenset({"Add", "Sub", "Mul", "Pow", "BitShift", "ReduceSum", "ReduceProd"})


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    from onnx import TensorProto as T

    types = {name: view.element_type(name) for name in node.input if name}
    narrow = {kind for kind in types.values() if kind in (T.INT8, T.UINT8)}
    if len(narrow) != 1:
        return None
    (kind,) = narrow
    wide = T.FLOAT if node.op_type in _IN_FLOAT else T.INT32
    nodes, inputs = [], []
    for name in node.input:
        if types.get(name) != kind:
            inputs.append(name)
            continue
        inputs.append(view.fresh(f"{name}_wide"))
        nodes.append(make("Cast", [name], [inputs[-1]], node, to=wide))
    computed = with_inputs(node, inputs)
    nodes.append(computed)
    if node.op_type in _TO_BOOL or node.op_type in _TO_INDEX:
        return nodes
    output = node.output[0]
    computed.output[0] = view.fresh(f"{output}_wide")
    result = computed.output[0]
    if kind == T.UINT8 and node.op_type in _WRAPPING:
        span = view.add_constant(np.int32(256), f"{output}_span")
        wrapped = view.fresh(f"{output}_wrapped")
        nodes.append(make("Mod", [result, span], [wrapped], node))
        result = wrapped
    nodes.append(make("Cast", [result], [output], node, to=kind))
    return nodes


RULE = Rule(
    name="narrow_integers",
    operators=frozenset(
        {
            "Add",
            "Sub",
            "Mul",
            "Div",
            "Pow",
            "Mod",
            "Max",
            "Min",
            "Less",
            "Greater",
            "LessOrEqual",
            "GreaterOrEqual",
            "Equal",
            "BitShift",
            "Abs",
            "Neg",
            "Sign",
            "Clip",
            "Where",
            "MaxPool",
            "ReduceSum",
            "ReduceMax",
            "ReduceMin",
            "ReduceProd",
            "ReduceMean",
            "ArgMax",
            "ArgMin",
            "TopK",
            "CumSum",
            "Relu",
        }
    ),
    reason="int8 and uint8 operands crash the engine",
    engines=("3.6.1",),
    cures=("test_add_uint8", "test_add_int8", "test_max_uint8", "test_maxpool_2d_uint8"),
    rewrite=_rewrite,
)
