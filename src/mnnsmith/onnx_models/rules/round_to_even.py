"""`Round` takes a half away from zero or up; ONNX takes it to the even neighbour.

With f = floor(x) and d = x - f: f + 1 where d > 1/2, or d = 1/2 and f is odd; else f."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mnnsmith.onnx_models.graph_view import GraphView, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    output = node.output[0]
    nodes: list[NodeProto] = []

    def step(op: str, *inputs: str, to: str = "") -> str:
        result = to or view.fresh(f"{output}_{op}")
        nodes.append(make(op, inputs, [result], node))
        return result

    half, two, one = (
        view.add_constant(np.float32(value), f"{output}_constant") for value in (0.5, 2, 1)
    )
    floor = step("Floor", node.input[0])
    part = step("Sub", node.input[0], floor)
    # 1 for an odd floor: floor - 2 * floor(floor / 2), which is right for negative ones, too.
    odd = step("Sub", floor, step("Mul", two, step("Floor", step("Mul", floor, half))))
    # The least share that goes up: above one half for an even floor, from one half on for an odd.
    up = step("Where", step("Greater", odd, half), step("GreaterOrEqual", part, half),
              step("Greater", part, half))  # fmt: skip
    step("Where", up, step("Add", floor, one), floor, to=output)
    return nodes


RULE = Rule(
    name="round_to_even",
    operators=frozenset({"Round"}),
    reason="halves are not rounded to the even neighbour",
    engines=("3.6.1",),
    cures=("test_round",),
    rewrite=_rewrite,
)
