"""An omitted output of a recurrent operator shifts the others; each gets a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    from onnx import NodeProto

    if all(node.output):
        return None
    copy = NodeProto()
    copy.CopyFrom(node)
    given = next(name for name in node.output if name)
    for index, name in enumerate(node.output):
        if not name:
            copy.output[index] = view.fresh(f"{given}_unused{index}")
    return [copy]


RULE = Rule(
    name="recurrent_outputs",
    operators=frozenset({"LSTM", "GRU", "RNN"}),
    reason="an omitted output shifts the others",
    engines=("3.6.1",),
    cures=("test_lstm_defaults", "test_gru_defaults", "test_simple_rnn_defaults"),
    rewrite=_rewrite,
)
