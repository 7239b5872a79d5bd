"""The direction `reverse` of a recurrence is ignored; the steps are turned before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make, with_attributes
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    found, shape = attributes(node), view.shape(node.input[0])
    if found.get("direction", "forward") != "reverse" or found.get("layout", 0) or shape is None:
        return None
    if not isinstance(shape[0], int) or (len(node.input) > 4 and node.input[4]):
        return None
    output = next(name for name in node.output if name)
    turned = view.add_constant(np.arange(shape[0] - 1, -1, -1, dtype=np.int64), f"{output}_turned")
    steps = view.fresh(f"{output}_steps")
    forward = with_attributes(node, {"direction": "forward"})
    forward.input[0] = steps
    nodes = [make("Gather", [node.input[0], turned], [steps], node, axis=0), forward]
    if node.output[0]:
        forward.output[0] = view.fresh(f"{output}_forward")
        nodes.append(make("Gather", [forward.output[0], turned], [node.output[0]], node, axis=0))
    return nodes


RULE = Rule(
    name="reversed_recurrence",
    operators=frozenset({"LSTM", "GRU", "RNN"}),
    reason="the direction reverse is ignored",
    engines=("3.6.1",),
    cures=("test_lstm_reverse", "test_gru_reverse"),
    rewrite=_rewrite,
)
