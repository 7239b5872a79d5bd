"""`ArgMax` and `ArgMin` know the first of equal values only; the last is the first from behind.

last(x) = size - 1 - first(reversed x)."""

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
    if not found.pop("select_last_index", 0) or shape is None:
        return None
    axis = found.get("axis", 0) % len(shape)
    size, output = shape[axis], node.output[0]
    if not isinstance(size, int):
        return None
    turned = view.add_constant(np.arange(size - 1, -1, -1, dtype=np.int64), f"{output}_turned")
    last = view.add_constant(np.int64(size - 1), f"{output}_last")
    reversed_, index = view.fresh(f"{output}_reversed"), view.fresh(f"{output}_first")
    return [
        make("Gather", [node.input[0], turned], [reversed_], node, axis=axis),
        make(node.op_type, [reversed_], [index], node, **found),
        make("Sub", [last, index], [output], node),
    ]


RULE = Rule(
    name="last_of_equals",
    operators=frozenset({"ArgMax", "ArgMin"}),
    reason="select_last_index is ignored",
    engines=("3.6.1",),
    cures=(
        "test_argmax_keepdims_example_select_last_index",
        "test_argmin_no_keepdims_example_select_last_index",
    ),
    rewrite=_rewrite,
)
