"""`Shrink` is computed wrongly; it is composed.

y = x + bias where x < -lambd, x - bias where x > lambd, else 0."""

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
    x, output = node.input[0], node.output[0]
    limit, bias, zero = (
        view.add_constant(np.float32(value), f"{output}_constant")
        for value in (found.get("lambd", 0.5), found.get("bias", 0.0), 0)
    )
    negated = view.add_constant(np.float32(-found.get("lambd", 0.5)), f"{output}_constant")
    nodes: list[NodeProto] = []

    def step(op: str, *inputs: str, to: str = "") -> str:
        result = to or view.fresh(f"{output}_{op}")
        nodes.append(make(op, inputs, [result], node))
        return result

    lower, upper = step("Greater", negated, x), step("Greater", x, limit)
    above = step("Where", upper, step("Sub", x, bias), zero)
    step("Where", lower, step("Add", x, bias), above, to=output)
    return nodes


RULE = Rule(
    name="composed_shrink",
    operators=frozenset({"Shrink"}),
    reason="Shrink is wrong",
    engines=("3.6.1",),
    cures=("test_shrink_hard", "test_shrink_soft"),
    rewrite=_rewrite,
)
