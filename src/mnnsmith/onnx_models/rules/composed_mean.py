"""`Mean` of several operands fails in the run; it is their sum by their number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    if len(node.input) < 2:
        return None
    total = view.fresh(f"{node.output[0]}_total")
    count = view.add_constant(np.float32(len(node.input)), f"{node.output[0]}_count")
    return [
        make("Sum", node.input, [total], node),
        make("Div", [total, count], node.output, node),
    ]


RULE = Rule(
    name="composed_mean",
    operators=frozenset({"Mean"}),
    reason="Mean of two operands fails in the run",
    engines=("3.6.1",),
    cures=("test_mean_two_inputs",),
    rewrite=_rewrite,
)
