"""`Mod` of floats takes the sign of the dividend; without fmod it must be that of the divisor.

mod(a, b) = a - floor(a / b) * b."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mnnsmith.onnx_models.graph_view import GraphView, attributes, make
from mnnsmith.onnx_models.rules.rule import Rule

if TYPE_CHECKING:
    from onnx import NodeProto


def _rewrite(node: NodeProto, view: GraphView) -> Sequence[NodeProto] | None:
    a, b = node.input
    if attributes(node).get("fmod", 0) or view.element_type(a) is None or not view.is_float(a):
        return None
    output = node.output[0]
    ratio, floor, whole = (view.fresh(f"{output}_{part}") for part in ("ratio", "floor", "whole"))
    return [
        make("Div", [a, b], [ratio], node),
        make("Floor", [ratio], [floor], node),
        make("Mul", [floor, b], [whole], node),
        make("Sub", [a, whole], [output], node),
    ]


RULE = Rule(
    name="floor_mod",
    operators=frozenset({"Mod"}),
    reason="Mod of floats of unlike signs is wrong",
    engines=("3.6.1",),
    cures=("test_mod_float32_mixed_sign_fmod_0",),
    rewrite=_rewrite,
)
