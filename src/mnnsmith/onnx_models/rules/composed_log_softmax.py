"""`LogSoftmax` crashes the converter in some forms; it is composed.

y = (x - m) - log(sum exp(x - m)), where m = max x keeps the powers finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto

_ONE_AXIS_SINCE = 13
_AXES_AS_INPUT_SINCE = 18


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    shape = view.shape(node.input[0])
    if view.opset < _ONE_AXIS_SINCE or shape is None:
        return None
    axis = attributes(node).get("axis", -1) % len(shape)
    x, output = node.input[0], node.output[0]
    axes = view.add_constant(np.array([axis], np.int64), f"{output}_axes")
    largest, moved, powers, total, log = (
        view.fresh(f"{output}_{part}") for part in ("max", "moved", "exp", "sum", "log")
    )
    view.note_type(moved, x, shape)
    if view.opset < _AXES_AS_INPUT_SINCE:
        top = make("ReduceMax", [x], [largest], node, axes=[axis], keepdims=1)
    else:
        top = make("ReduceMax", [x, axes], [largest], node, keepdims=1)
    return [
        top,
        make("Sub", [x, largest], [moved], node),
        make("Exp", [moved], [powers], node),
        make("ReduceSum", [powers, axes], [total], node, keepdims=1),
        make("Log", [total], [log], node),
        make("Sub", [moved, log], [output], node),
    ]


RULE = Rule(
    name="composed_log_softmax",
    operators=frozenset({"LogSoftmax"}),
    reason="some forms of LogSoftmax crash the converter",
    engines=("3.6.1",),
    cures=("test_logsoftmax_default_axis", "test_logsoftmax_large_number"),
    rewrite=_rewrite,
)
